"""Dispatch to rows at fixed places for each expert, and combine with weights that stay at their source.

This is DeepEP's low-latency contract, over a buffer with layout="experts" and sums="invariant". Autograd and torch's
dispatcher do not see these ops. Both come in halves: a dispatch announces its rows and a combine sends them, and
`Half.finish` waits and receives. The caller may write the inputs again after the first half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.engine.engine import Engine
from moe_rt.errors import Op


class Half:
    """An op that has begun.

    Attributes:
        outputs: tensors that `finish` fills.
        handle: that of a dispatch; None for a combine.
    """

    outputs: Any
    handle: Handle | None = None

    def __init__(self, engine: Engine, op: Op, method: str, *given: Any, wait: bool, **options: Any) -> None:
        """Begin the op; if `wait`, run it whole."""
        self._engine, self._method = engine, method
        self._begun = None if wait else engine.under_way(op, method, *given, **options)
        self.outputs = getattr(engine, method)(*given, **options) if self._begun is None else self._begun.outputs

    def finish(self) -> None:
        """Wait for every rank to begin the op, and fill the outputs. Does nothing after the first time.

        Raises:
            MoeRtError: see moe_rt.Buffer.dispatch.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            self._engine.finish(self._method, begun.ticket)


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
    codes, scales = x if isinstance(x, tuple) else (x, None)
    half = Half(
        buffer._engine, Op.DISPATCH, "dispatch", codes, topk_idx, weights, 0, max_tokens,
        scaled=scales is not None, scales=scales, expert_rows=buffer.num_ranks * max_tokens, wait=wait,
    )  # fmt: skip
    _, _, offs, recv_plan, send_plan, *_ = half.outputs
    half.handle = Handle(offs=offs, recv_plan=recv_plan, send_plan=send_plan, tag=0)
    return half


def combine(buffer: Buffer, y: Tensor, handle: Handle, topk_weights: Tensor, out: Tensor | None, *, wait: bool) -> Half:
    """Return out [T, H]: the sum of each token's rows times topk_weights [T, K], in the order of topk_idx. Collective.

    Args:
        y: [L * R * M, H], rows at the places of recv_x.
        out: [T, H], written; None: a new tensor, which is the output.
    """
    if not wait:
        topk_weights = topk_weights.clone()  # the second half reads them
    plans = handle.recv_plan, handle.send_plan
    half = Half(buffer._engine, Op.COMBINE, "combine", y, None, *plans, 0, out, topk_weights=topk_weights, wait=wait)
    if out is not None:
        half.outputs = out  # an op under way keeps a view of it
    return half


def without_entries(handle: Handle, entries: Tensor) -> Handle:
    """Return a handle whose combine leaves out these entries, bool [T, K]."""
    left = torch.where(entries, -1, handle.send_plan)
    return Handle(offs=handle.offs, recv_plan=handle.recv_plan, send_plan=left, tag=handle.tag)
