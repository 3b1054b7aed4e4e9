"""Dispatch to rows at fixed places for each expert, and combine with weights that stay at their source.

This is DeepEP's low-latency contract, over a buffer with layout="experts" and sums="invariant". Autograd and torch's
dispatcher do not see these ops. Both come in halves: a dispatch announces its rows and a combine sends them, and
`Half.finish` waits and receives. The caller may write the inputs again after the first half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.engine.engine import Engine
from moe_rt.errors import Op


class Half:
    """An op that has begun, or is complete.

    Attributes:
        outputs: tensors that `finish` fills.
        handle: that of a dispatch; None for a combine.
    """

    __slots__ = ("_finish", "handle", "outputs")

    def __init__(self, outputs: Any, finish: Callable[[], Any] | None = None) -> None:
        self.outputs, self._finish = outputs, finish
        self.handle: Handle | None = None

    @classmethod
    def begin(cls, engine: Engine, op: Op, method: str, *given: Any, **options: Any) -> Half:
        """Run the first half of the op whose whole is this method of the engine."""
        begun = engine.under_way(op, method, *given, **options)
        return cls(begun.outputs, partial(engine.finish, method, begun.ticket))

    def finish(self) -> None:
        """Wait for every rank to begin the op, and fill the outputs. Does nothing after the first time.

        Raises:
            MoeRtError: see moe_rt.Buffer.dispatch.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def dispatch(buffer: Buffer, x: Any, topk_idx: Tensor, weights: Tensor, max_tokens: int, *, wait: bool) -> Half:
    """Send every token to its experts. Collective.

    Args:
        x: [T, H], or (codes, scales).
        topk_idx, weights: [T, K]; the weights are not used.
        max_tokens: M, identical on every rank.
        wait: run the whole op.

    Returns:
        The op. Its outputs begin with recv_x [L * R * M, H], in which the rows of local expert e begin at e * R * M, in
        the order source rank, token; with codes, recv_scales [L * R * M, S] is the last one.
    """
    engine = buffer._engine
    codes, scales = x if isinstance(x, tuple) else (x, None)
    given = codes, topk_idx, weights, 0, max_tokens
    options = {"scaled": scales is not None, "scales": scales, "expert_rows": engine.spec.num_ranks * max_tokens}
    if wait:
        half = Half(engine.dispatch(*given, **options))
    else:
        half = Half.begin(engine, Op.DISPATCH, "dispatch", *given, **options)
    _, _, offs, recv_plan, send_plan, *_ = half.outputs
    half.handle = Handle(offs=offs, recv_plan=recv_plan, send_plan=send_plan, tag=0)
    return half


def combine(buffer: Buffer, y: Tensor, handle: Handle, topk_weights: Tensor, out: Tensor | None, *, wait: bool) -> Half:
    """Return out [T, H]: the sum of each token's rows times topk_weights [T, K], in the order of topk_idx. Collective.

    Args:
        y: [L, R * M, H], rows at the places of recv_x.
        out: [T, H], written; None: a new tensor, which is the output.
    """
    given = y, None, handle.recv_plan, handle.send_plan, 0, out
    if wait:
        return Half(buffer._engine.combine(*given, topk_weights=topk_weights))
    weights = topk_weights.clone()  # the second half reads them
    half = Half.begin(buffer._engine, Op.COMBINE, "combine", *given, topk_weights=weights)
    if out is not None:
        half.outputs = out  # an op under way keeps a view of it
    return half


def without_entries(handle: Handle, entries: Tensor) -> Handle:
    """Return a handle whose combine leaves out these entries, bool [T, K]."""
    left = torch.where(entries, -1, handle.send_plan)
    return Handle(offs=handle.offs, recv_plan=handle.recv_plan, send_plan=left, tag=handle.tag)
