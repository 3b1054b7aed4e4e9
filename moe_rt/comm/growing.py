"""Buffers whose size nobody has to know beforehand: made at first use, and again, larger, when a batch outgrows them.

Ranks hold different numbers of tokens, and none knows its peers'. On CPU ranks a batch that does not fit is refused by
every rank in the same op, so the op itself tells all of them to grow: batches that fit cost no host collective. On CUDA
ranks a refusal ends the group, so there the ranks compare sizes before each dispatch, unless a size was given.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rt.comm.buffer import Buffer
from moe_rt.comm.handle import Handle
from moe_rt.config.options import GPU_HEAPS, BufferOptions
from moe_rt.errors import ConfigMismatch, InvalidConfig, TooManyTokens
from moe_rt.heap.groups import Group, rendezvous_of
from moe_rt.heap.rendezvous import all_gather_records
from moe_rt.kernels import cuda_activation

# Sizes are rounded up to this many tokens, so that batches which differ by a few make no new buffer.
_GRANULE = 64


@dataclass(frozen=True, kw_only=True)
class GrowingOptions(BufferOptions):
    """What a user may choose about buffers that are made for them; the same on every rank.

    Attributes:
        num_max_tokens_per_rank: a fixed size; None grows as needed.
    """

    num_max_tokens_per_rank: int | None = None

    def __post_init__(self) -> None:
        size = self.num_max_tokens_per_rank
        if size is not None and (not isinstance(size, int) or size < 1):
            raise InvalidConfig(f"num_max_tokens_per_rank: got {size!r}, expected a positive integer, or None to grow")


class Lease:
    """Keeps a buffer while something holds the lease.

    Ops name a buffer by an integer, so graphs hold a lease: a larger buffer may take its place before their backward.
    Neither they nor models hold the buffer itself: graphs may outlive the interpreter, and native engines must not.
    """

    def __init__(self, buffer: Buffer) -> None:
        _leased[self] = buffer

    @property
    def buffer(self) -> Buffer:
        return _leased[self]

    def hold_for_backward(self, out: Tensor) -> None:
        """Until the graph that made `out` is gone."""
        node: Any = out.grad_fn
        if node is not None:
            node.metadata["moe_rt.lease"] = self


_leased: weakref.WeakKeyDictionary[Lease, Buffer] = weakref.WeakKeyDictionary()
atexit.register(_leased.clear)


@dataclass(frozen=True)
class Received:
    """What a dispatch brought, and the lease on the buffer that has to combine it."""

    rows: Tensor
    weights: Tensor
    handle: Handle
    lease: Lease

    def combine(self, y: Tensor) -> Tensor:
        """The experts' rows back to their tokens; see `moe_rt.Buffer.combine`."""
        out = self.lease.buffer.combine(y, self.weights, self.handle)
        self.lease.hold_for_backward(out)
        return out


class GrowingBuffer:
    """One group's buffer for rows of one kind, shared by all layers that send such rows.

    Args:
        group: the ranks.
        options: see GrowingOptions.
        sizes: hidden, num_topk, num_experts and dtype of `moe_rt.Buffer`.
    """

    def __init__(self, group: Group, options: GrowingOptions, **sizes: Any) -> None:
        self._group, self.options, self._sizes = group, options, sizes
        self._num_tags = 0
        self.lease: Lease | None = None
        self.compares_each_call = False

    def new_tag(self) -> int:
        """A layer's tag; layers ask at their first forward, which is in the same order on every rank."""
        self._num_tags += 1
        return self._num_tags

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tag: int) -> Received:
        """As `moe_rt.Buffer.dispatch`, for any number of tokens unless the size is fixed. Collective."""
        lease = self.lease
        if lease is None or (self.compares_each_call and self._most(x.shape[0], lease.buffer) > _size(lease.buffer)):
            lease = self._grow(x.shape[0])
        try:
            rows, weights, handle = lease.buffer.dispatch(x, topk_idx, topk_weights, tag=tag)
        except TooManyTokens:
            if self.options.num_max_tokens_per_rank is not None or self.compares_each_call:
                raise
            lease = self._grow(x.shape[0])
            rows, weights, handle = lease.buffer.dispatch(x, topk_idx, topk_weights, tag=tag)
        lease.hold_for_backward(rows)
        return Received(rows, weights, handle, lease)

    def _most(self, num_tokens: int, buffer: Buffer) -> int:
        """The largest batch of any rank, where a refusal is no way to find out."""
        if buffer.process_group is None:  # threads, which meet without it
            return self._agree(num_tokens)
        most = torch.tensor(num_tokens, device=buffer.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, buffer.process_group)
        return int(most)

    def _grow(self, num_tokens: int) -> Lease:
        """Makes the buffer. The one before, if any, goes when no graph has to go back through it any more."""
        o = self.options
        size, most = o.num_max_tokens_per_rank, self._agree(num_tokens)
        if size is None:
            before = 0 if self.lease is None else _size(self.lease.buffer)
            size = -(-max(most, before + before // 2, 1) // _GRANULE) * _GRANULE
        buffer = Buffer(self._group, num_max_tokens_per_rank=size, **self._sizes, **o.arguments())
        if buffer.heap in GPU_HEAPS:  # there a batch that is refused ends the group
            self.compares_each_call = o.num_max_tokens_per_rank is None
        if buffer.device.type == "cuda":
            cuda_activation.prepare(buffer.device, self._sizes["dtype"])
        self.lease = Lease(buffer)
        return self.lease

    def _agree(self, num_tokens: int) -> int:
        """The most tokens of any rank; ranks that were configured differently all raise ConfigMismatch."""
        rendezvous = rendezvous_of(self._group)
        mine = {"size": self.options.num_max_tokens_per_rank, "tokens": num_tokens}
        records = all_gather_records(rendezvous, mine, self.options.init_timeout_s, "compare its batch")
        expected = records[0].get("size")
        for peer, record in enumerate(records):
            if record.get("size") != expected:
                message = f"num_max_tokens_per_rank: got {record.get('size')} on rank {peer}, expected {expected}"
                raise ConfigMismatch(f"{message} as on rank 0", rank=rendezvous.rank, peer=peer)
        return max(int(record["tokens"]) for record in records)


class SharedBuffers:
    """The buffers of layers that were made together, one for each kind of rows.

    Layers that are made on one group before any of them runs belong together. What they share is thereby a matter of
    the program, the same on every rank, and not of when a rank's garbage is collected; it goes when the last layer
    does.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._buffers: dict[tuple[Any, ...], GrowingBuffer] = {}

    @classmethod
    def join(cls, group: Group) -> SharedBuffers:
        """For a layer that is being made."""
        if _making.buffers is None or _making.buffers.group is not group:
            _making.buffers = cls(group)
        return _making.buffers

    def get(self, options: GrowingOptions, **sizes: Any) -> GrowingBuffer:
        """The buffer for these rows: the same as before, unless the options have changed."""
        if _making.buffers is self:
            _making.buffers = None
        key = tuple(sorted(sizes.items()))
        if key not in self._buffers or self._buffers[key].options != options:
            self._buffers[key] = GrowingBuffer(self.group, options, **sizes)
        return self._buffers[key]


class _Making(threading.local):
    """Whose layers are still being made: one at most, of each rank, which may be a thread."""

    buffers: SharedBuffers | None = None


_making = _Making()


def _size(buffer: Buffer) -> int:
    return buffer.spec.num_max_tokens_per_rank
