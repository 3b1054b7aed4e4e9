"""Dispatch and combine for a layer of another library, through a fixed or a growing buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.buffer.pool import BufferPool, GrowingBuffer, GrowingOptions, Received
from moe_rt.group.groups import Group, process_group_of, rendezvous_of


@dataclass(frozen=True)
class ReceivedOnce:
    """Result of one dispatch, like `moe_rt.buffer.pool.Received`, from a fixed buffer, which is never replaced."""

    rows: Tensor
    weights: Tensor
    handle: Handle
    buffer: Buffer

    def combine(self, y: Tensor) -> Tensor:
        """Return the experts' rows to their tokens; see `moe_rt.Buffer.combine`."""
        return self.buffer.combine(y, self.weights, self.handle)


Exchanged = Received | ReceivedOnce


class LayerExchange:
    """Dispatches of one layer. Layers of one group that send rows of one size and dtype share a buffer.

    With num_max_tokens_per_rank, the buffer is made once, hosts do not wait for each other, and more tokens raise
    TooManyTokens. Without it, the first dispatch makes a buffer for the largest batch of any rank, and a batch that
    does not fit makes a larger one: see `moe_rt.buffer.pool`.

    Args:
        group: the ranks; see `moe_rt.Buffer`.
        num_experts: experts of the group (E).
        num_topk: maximum number of experts of a token (K).
        options: identical on every rank.

    Attributes:
        num_ranks: number of ranks of the group.
    """

    def __init__(self, group: Group, *, num_experts: int, num_topk: int, options: GrowingOptions) -> None:
        # Frameworks make a new mesh for each layer; all these meshes have the same group.
        members = process_group_of(group) if isinstance(group, DeviceMesh) else group
        self.num_ranks = rendezvous_of(group).size
        self._sizes = dict(num_experts=num_experts, num_topk=num_topk)
        self._options = options
        grows = options.num_max_tokens_per_rank is None
        self._pool = BufferPool.join(members) if grows else BufferPool(members)
        self._kind: tuple[int, torch.dtype] | None = None
        self._buffer: Buffer | GrowingBuffer | None = None
        self._tag = 0

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Exchanged:
        """Dispatch x [T, H] to the experts topk_idx [T, K]; see `moe_rt.Buffer.dispatch`. Collective."""
        self.open(x.shape[1], x.dtype)
        buffer = self._buffer
        if isinstance(buffer, Buffer):
            rows, weights, handle = buffer.dispatch(x, topk_idx, topk_weights, tag=self._tag)
            return ReceivedOnce(rows, weights, handle, buffer)
        assert buffer is not None
        return buffer.dispatch(x, topk_idx, topk_weights, self._tag)

    def open(self, hidden: int, dtype: torch.dtype) -> None:
        """Select the buffer for rows of this size and dtype, or make it, which is collective if its size is given."""
        if self._kind == (hidden, dtype):
            return
        sizes: dict[str, Any] = dict(self._sizes, hidden=hidden, dtype=dtype)
        size = self._options.num_max_tokens_per_rank
        if size is None:
            self._buffer = self._pool.growing(self._options, **sizes)
        else:
            self._buffer = self._pool.fixed(num_max_tokens_per_rank=size, **sizes, **self._options.arguments())
        self._kind, self._tag = (hidden, dtype), self._buffer.new_tag()

    # torch.compiler.assume_constant_result does the same, but imports the compiler first, which takes seconds. A buffer
    # is made before the graph that needs it runs; the trace records only guards on the rows' size and dtype.
    open._dynamo_marked_constant = True  # type: ignore[attr-defined]
