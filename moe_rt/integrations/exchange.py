"""Where a layer of another library sends its tokens: a buffer of the size that was given, or one that grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.comm.buffer import Buffer
from moe_rt.comm.growing import GrowingBuffer, GrowingOptions, Received, SharedBuffers
from moe_rt.comm.handle import Handle
from moe_rt.comm.shared_buffers import shared_buffer
from moe_rt.heap.groups import Group, process_group_of, rendezvous_of


@dataclass(frozen=True)
class ReceivedOnce:
    """As `moe_rt.comm.growing.Received`, from a buffer that no other takes the place of."""

    rows: Tensor
    weights: Tensor
    handle: Handle
    buffer: Buffer

    def combine(self, y: Tensor) -> Tensor:
        """The experts' rows back to their tokens; see `moe_rt.Buffer.combine`."""
        return self.buffer.combine(y, self.weights, self.handle)


Exchanged = Received | ReceivedOnce


class LayerExchange:
    """One layer's dispatches. Layers of one group that send rows of one kind share a buffer.

    With a size, the buffer is made once and no rank's host waits for another; more tokens raise TooManyTokens. Without
    one, the first dispatch makes it for the largest batch of any rank, and a batch that does not fit makes a larger
    one: see `moe_rt.comm.growing`.

    Args:
        group: the ranks.
        num_experts: experts of the group.
        num_topk: the most experts of a token (K).
        options: the same on every rank.

    Attributes:
        num_ranks: of the group.
    """

    def __init__(self, group: Group, *, num_experts: int, num_topk: int, options: GrowingOptions) -> None:
        # Frameworks make meshes anew for each layer; the group of all of them is one.
        self._group = process_group_of(group) if isinstance(group, DeviceMesh) else group
        self.num_ranks = rendezvous_of(group).size
        self._sizes = dict(num_experts=num_experts, num_topk=num_topk)
        self._options = options
        self._shared = SharedBuffers.join(self._group) if options.num_max_tokens_per_rank is None else None
        self._kind: tuple[int, torch.dtype] | None = None
        self._place: Buffer | GrowingBuffer | None = None
        self._tag = 0

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Exchanged:
        """As `moe_rt.Buffer.dispatch`. Collective."""
        self.open(x.shape[1], x.dtype)
        place = self._place
        if isinstance(place, Buffer):
            rows, weights, handle = place.dispatch(x, topk_idx, topk_weights, tag=self._tag)
            return ReceivedOnce(rows, weights, handle, place)
        assert place is not None
        return place.dispatch(x, topk_idx, topk_weights, self._tag)

    def open(self, hidden: int, dtype: torch.dtype) -> None:
        """Takes the place for rows of this kind, if it is not there yet; with a size, that is collective."""
        if self._kind == (hidden, dtype):
            return
        sizes: dict[str, Any] = dict(self._sizes, hidden=hidden, dtype=dtype)
        if self._shared is not None:
            self._place = self._shared.get(self._options, **sizes)
        else:
            most = self._options.num_max_tokens_per_rank
            self._place = shared_buffer(self._group, num_max_tokens_per_rank=most, **sizes, **self._options.arguments())
        self._kind, self._tag = (hidden, dtype), self._place.new_tag()

    # What torch.compiler.assume_constant_result does, after it has imported the compiler, which takes seconds: a buffer
    # is made before the graph that needs it runs, and its trace holds no more than the guards on the kind of rows.
    open._dynamo_marked_constant = True  # type: ignore[attr-defined]
