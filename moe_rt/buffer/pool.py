"""Buffers that layers share, so that each size and dtype takes symmetric memory only once.

A `BufferPool` has two kinds of buffers. A fixed buffer has a given size; all layers of its group that need it share it.
A growing buffer is made at first use, and replaced by a larger one when a batch outgrows it; layers of one pool share
it, and a `Lease` keeps a replaced buffer alive for graphs that still need it. `LayerBuffers` are the fixed buffers of
one layer, one for each dtype.

Buffers grow because ranks hold different numbers of tokens, and no rank knows its peers' counts. All CPU ranks refuse a
batch that does not fit in the same op, and then all grow: batches that fit cost no host collective. On CUDA ranks a
refusal ends the group, so these ranks compare sizes before each dispatch, unless a size was given.
"""

from __future__ import annotations

import atexit
import functools
import secrets
import threading
import warnings
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.config.options import BufferOptions
from moe_rt.errors import ConfigMismatch, InvalidConfig, TooManyTokens
from moe_rt.group.groups import Group, rendezvous_of
from moe_rt.group.rendezvous import ThreadGroup, all_gather_records
from moe_rt.memory.heaps import HEAPS
from moe_rt.ops import cuda_activation

# Sizes are rounded up to a multiple of this many tokens, so that slightly larger batches need no new buffer.
_GRANULE = 64

# An entry lives as long as a layer holds its buffer. The key holds the group, so its identity is not reused meanwhile.
_fixed: WeakValueDictionary[tuple[Any, ...], Buffer] = WeakValueDictionary()
_names: WeakKeyDictionary[Buffer, str] = WeakKeyDictionary()  # the same on every rank


class BufferPool:
    """Buffers that layers of one group share.

    Every pool of a group has the same fixed buffers; the last layer that holds one frees it. Growing buffers belong to
    one pool, which layers hold: layers made on one group before any of them runs join the same pool. Sharing therefore
    depends only on the program, which is identical on every rank, and not on when a rank collects garbage.

    Args:
        group: the ranks; see `moe_rt.Buffer`.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._growing: dict[tuple[Any, ...], GrowingBuffer] = {}

    @classmethod
    def join(cls, group: Group) -> BufferPool:
        """Return the pool that a layer under construction joins."""
        if _making.pool is None or _making.pool.group is not group:
            _making.pool = cls(group)
        return _making.pool

    def growing(self, options: GrowingOptions, **sizes: Any) -> GrowingBuffer:
        """Return the growing buffer for these rows: the same one each time, unless the options have changed."""
        if _making.pool is self:
            _making.pool = None
        key = tuple(sorted(sizes.items()))
        if key not in self._growing or self._growing[key].options != options:
            self._growing[key] = GrowingBuffer(self.group, options, **sizes)
        return self._growing[key]

    def fixed(self, **sizes: Any) -> Buffer:
        """Return the open buffer of this group and these sizes; make one if some rank has none. Collective.

        A rank may still hold a buffer that its peers have freed or closed, so ranks compare theirs first.

        Args:
            sizes: the arguments of moe_rt.Buffer other than the group.

        Raises:
            MoeRtError: see moe_rt.Buffer.
        """
        group = self.group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        key = (group, *sorted(sizes.items()))
        found = _fixed.get(key)
        if found is not None and found.closed:
            found = None
        rendezvous = rendezvous_of(group)
        name = "" if found is None else _names[found]
        if rendezvous.size > 1:
            mine = {"open": name, "next": secrets.token_hex(8), "tag": 0 if found is None else found._num_tags}
            timeout_s = sizes.get("init_timeout_s", BufferOptions.init_timeout_s)
            everyone = all_gather_records(rendezvous, mine, timeout_s, "compare the buffers of its layers")
            if {record.get("open") for record in everyone} != {name}:
                found = None
            if found is not None:  # a rank on which a layer could not be made has another count
                found.reserve_tags(max(int(record["tag"]) for record in everyone))
            name = str(everyone[0].get("next"))
        if found is None:
            found = _fixed[key] = Buffer(group, **sizes)
            _names[found] = name
        return found


class _Making(threading.local):
    """The pool that new layers still join; at most one per thread, since a rank may be a thread."""

    pool: BufferPool | None = None


_making = _Making()


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


_leased: WeakKeyDictionary[Lease, Buffer] = WeakKeyDictionary()
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
        if HEAPS[buffer.heap].gpu:  # on GPUs a refused batch ends the group
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


def _size(buffer: Buffer) -> int:
    return buffer.spec.num_max_tokens_per_rank


class LayerBuffers:
    """Fixed buffers of one layer: one for each dtype that its rows have had. A copied layer shares them.

    A pickle omits them, and the first use makes new ones, collectively: neither a group nor its memory can be pickled.
    So a layer pickles only if another process can find its group: a single rank or the default process group. Other
    layers refuse, with a message that says what to do instead.

    Args:
        group, sizes: the arguments of moe_rt.Buffer; sizes["dtype"] is the dtype of the first buffer.
        fixed: all rows have the dtype of the first buffer.
        has_kernel: experts run kernels that are compiled for each dtype on CUDA.
        first: the first buffer; None makes one.

    Attributes:
        fixed: the dtype of all rows, or None if it follows the model.
        tag: the layer's tag.
    """

    def __init__(
        self, group: Group, sizes: dict[str, Any], *, fixed: bool, has_kernel: bool, first: Buffer | None
    ) -> None:
        self._group = dist.group.WORLD if group is None and dist.is_initialized() else group
        self._sizes, self._has_kernel = sizes, has_kernel
        buffer = self._prepared(BufferPool(group).fixed(**sizes) if first is None else first)
        self._place = buffer.rank, buffer.num_ranks, buffer.device.type
        over_default = buffer.process_group is not None and buffer.process_group is dist.group.WORLD
        self._travels = buffer.num_ranks == 1 or (over_default and not isinstance(group, DeviceMesh))
        self.tag = buffer.new_tag()
        self._dtype: torch.dtype = buffer.spec.dtype
        self.fixed = self._dtype if fixed else None
        self._by_dtype, self._used, self._warned = {self._dtype: buffer}, False, False

    @property
    def group(self) -> Group:
        """The ranks, as given or the default group."""
        return self._group

    @property
    def current(self) -> Buffer:
        """The buffer of the last forward, or the first one. Collective if the layer was unpickled.

        Raises:
            InvalidConfig: this process is not the rank that the layer's experts belong to.
            MoeRtError: see moe_rt.Buffer.
        """
        if self._dtype not in self._by_dtype:
            self._by_dtype[self._dtype] = self._make(self._dtype)
        return self._by_dtype[self._dtype]

    def use(self, dtype: torch.dtype) -> Buffer:
        """Return the buffer for rows of this dtype, or the fixed one. Collective if it does not exist yet."""
        self._open(dtype)
        return self._by_dtype[self.fixed or dtype]

    # Compilers call this while they trace and do not record it, because it depends only on the dtype, which they
    # guard. So a buffer is made before the graph that needs it runs.
    def _open(self, dtype: torch.dtype) -> None:
        if self.fixed is not None:
            self._compare(self.fixed, dtype)
            dtype = self.fixed
        if dtype not in self._by_dtype:
            if not self._used:  # made before model.to(dtype) or autocast, and not needed
                self._by_dtype.clear()
            self._by_dtype[dtype] = self._make(dtype)
        self._dtype, self._used = dtype, True

    # torch.compiler.assume_constant_result does the same, but imports the compiler first, which takes seconds.
    _open._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _make(self, dtype: torch.dtype) -> Buffer:
        rank, num_ranks, device = self._place
        group = self._group
        if group is None and num_ranks == 1:  # a layer made for a single rank stays on one
            group = _alone(device)
        elif group is None and not dist.is_initialized():
            raise InvalidConfig(
                f"layer: got a pickle of rank {rank} of {num_ranks} in a process without a default process group, "
                "expected torch.distributed.init_process_group first"
            )
        buffer = BufferPool(group).fixed(**{**self._sizes, "dtype": dtype})
        if (buffer.rank, buffer.num_ranks) != (rank, num_ranks):
            buffer.abort()  # so that ranks with the right pickle raise also
            raise InvalidConfig(
                f"layer: got a pickle of rank {rank} of {num_ranks} on rank {buffer.rank} of {buffer.num_ranks}, "
                "expected each rank to load its own; `moe-rt docs howto/resume` shows how to redistribute experts"
            )
        buffer.reserve_tags(self.tag)
        return self._prepared(buffer)

    def _prepared(self, buffer: Buffer) -> Buffer:
        if buffer.device.type == "cuda" and self._has_kernel:
            cuda_activation.prepare(buffer.device, buffer.spec.dtype)
        return buffer

    def waited_ns(self) -> list[int]:
        """Return the sum of moe_rt.Buffer.waited_ns over all buffers of the layer, in nanoseconds, [R]."""
        return [sum(times) for times in zip(*(b.waited_ns() for b in self._by_dtype.values()), strict=True)]

    def _compare(self, fixed: torch.dtype, dtype: torch.dtype) -> None:
        if fixed is not dtype and not self._warned:
            self._warned = True
            message = (
                f"dtype: got {fixed} in the config of a MoELayer whose parameters, or autocast, have {dtype}; rows "
                f"travel and experts compute in {fixed}. Leave it None to follow model.to() and autocast"
            )
            warnings.warn(message, stacklevel=2)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerBuffers:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if not self._travels:
            raise InvalidConfig(
                f"pickle: got a layer over a {type(self._group).__name__} of {self._place[1]} ranks, expected one of a "
                "single rank or of the default process group; save its state_dict() instead, and load that into a "
                "layer made with MoELayer(config, group)"
            )
        return {**self.__dict__, "_group": None, "_by_dtype": {}, "_used": False}


@functools.cache
def _alone(device: str) -> ThreadGroup:
    """Return a group of one rank, independent of the default process group; layers share it, and so its buffers."""
    return ThreadGroup.make(1, torch.device(device))[0]
