"""Buffers without a size given in advance: made at first use, and replaced by larger ones when a batch outgrows them.

Ranks hold different numbers of tokens, and no rank knows its peers' counts. All CPU ranks refuse a batch that does not
fit in the same op, and then all grow: batches that fit cost no host collective. On CUDA ranks a refusal ends the group,
so these ranks compare sizes before each dispatch, unless a size was given.
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

# Sizes are rounded up to a multiple of this many tokens, so that slightly larger batches need no new buffer.
_GRANULE = 64


@dataclass(frozen=True, kw_only=True)
class GrowingOptions(BufferOptions):
    """Options of buffers that an adapter makes for its user; identical on every rank.

    Attributes:
        num_max_tokens_per_rank: maximum number of tokens a rank dispatches in one call; None grows as needed.
    """

    num_max_tokens_per_rank: int | None = None

    def __post_init__(self) -> None:
        size = self.num_max_tokens_per_rank
        if size is not None and (not isinstance(size, int) or size < 1):
            raise InvalidConfig(f"num_max_tokens_per_rank: got {size!r}, expected a positive integer, or None to grow")


class Lease:
    """Keeps a buffer alive while any object holds the lease.

    Ops name a buffer by an integer, so graphs hold a lease: a larger buffer may replace it before their backward.
    Neither graphs nor models hold the buffer itself: graphs may outlive the interpreter, and native engines must not.
    """

    def __init__(self, buffer: Buffer) -> None:
        _leased[self] = buffer

    @property
    def buffer(self) -> Buffer:
        return _leased[self]

    def hold_for_backward(self, out: Tensor) -> None:
        """Make the graph of `out` hold this lease."""
        node: Any = out.grad_fn
        if node is not None:
            node.metadata["moe_rt.lease"] = self


_leased: weakref.WeakKeyDictionary[Lease, Buffer] = weakref.WeakKeyDictionary()
atexit.register(_leased.clear)


@dataclass(frozen=True)
class Received:
    """Result of one dispatch, and the lease on the buffer that must combine it."""

    rows: Tensor
    weights: Tensor
    handle: Handle
    lease: Lease

    def combine(self, y: Tensor) -> Tensor:
        """Return the experts' rows to their tokens; see `moe_rt.Buffer.combine`."""
        out = self.lease.buffer.combine(y, self.weights, self.handle)
        self.lease.hold_for_backward(out)
        return out


class GrowingBuffer:
    """A group's buffer for rows of one size and dtype, shared by all layers that send such rows.

    Args:
        group: the ranks; see `moe_rt.Buffer`.
        options: see GrowingOptions.
        sizes: hidden, num_topk, num_experts and dtype of `moe_rt.Buffer`.
    """

    def __init__(self, group: Group, options: GrowingOptions, **sizes: Any) -> None:
        self._group, self.options, self._sizes = group, options, sizes
        self._num_tags = 0
        self.lease: Lease | None = None
        self.compares_each_call = False

    def new_tag(self) -> int:
        """Return an unused layer tag. Layers ask at their first forward, in the same order on every rank."""
        self._num_tags += 1
        return self._num_tags

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tag: int) -> Received:
        """Dispatch any number of tokens, unless the size is fixed; see `moe_rt.Buffer.dispatch`. Collective."""
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
        """Return the largest batch of any rank, for ranks on which a refusal would end the group."""
        if buffer.process_group is None:  # ranks are threads
            return self._agree(num_tokens)
        most = torch.tensor(num_tokens, device=buffer.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, buffer.process_group)
        return int(most)

    def _grow(self, num_tokens: int) -> Lease:
        """Make a buffer. The previous one, if any, is freed when no graph needs it for its backward any more."""
        o = self.options
        size, most = o.num_max_tokens_per_rank, self._agree(num_tokens)
        if size is None:
            before = 0 if self.lease is None else _size(self.lease.buffer)
            size = -(-max(most, before + before // 2, 1) // _GRANULE) * _GRANULE
        buffer = Buffer(self._group, num_max_tokens_per_rank=size, **self._sizes, **o.arguments())
        if buffer.heap in GPU_HEAPS:  # on GPUs a refused batch ends the group
            self.compares_each_call = o.num_max_tokens_per_rank is None
        if buffer.device.type == "cuda":
            cuda_activation.prepare(buffer.device, self._sizes["dtype"])
        self.lease = Lease(buffer)
        return self.lease

    def _agree(self, num_tokens: int) -> int:
        """Return the largest batch of any rank. Raise ConfigMismatch on every rank if their fixed sizes differ."""
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
    """Buffers of layers that were made together, one for each row size and dtype.

    Layers made on one group before any of them runs belong together. Sharing therefore depends only on the program,
    which is identical on every rank, and not on when a rank collects garbage. The last layer frees the buffers.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._buffers: dict[tuple[Any, ...], GrowingBuffer] = {}

    @classmethod
    def join(cls, group: Group) -> SharedBuffers:
        """Return the shared buffers that a layer under construction joins."""
        if _making.buffers is None or _making.buffers.group is not group:
            _making.buffers = cls(group)
        return _making.buffers

    def get(self, options: GrowingOptions, **sizes: Any) -> GrowingBuffer:
        """Return the buffer for these rows: the same one each time, unless the options have changed."""
        if _making.buffers is self:
            _making.buffers = None
        key = tuple(sorted(sizes.items()))
        if key not in self._buffers or self._buffers[key].options != options:
            self._buffers[key] = GrowingBuffer(self.group, options, **sizes)
        return self._buffers[key]


class _Making(threading.local):
    """The shared buffers that new layers still join; at most one per thread, since a rank may be a thread."""

    buffers: SharedBuffers | None = None


_making = _Making()


def _size(buffer: Buffer) -> int:
    return buffer.spec.num_max_tokens_per_rank
