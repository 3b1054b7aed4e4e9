"""Buffers shared by the layers of a group: symmetric memory is paid once per size and dtype, not once per layer."""

from __future__ import annotations

import functools
import secrets
import warnings
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.comm.buffer import Buffer
from moe_rt.config.options import BufferOptions
from moe_rt.errors import InvalidConfig
from moe_rt.heap.groups import Group, rendezvous_of
from moe_rt.heap.rendezvous import ThreadGroup, all_gather_records
from moe_rt.kernels import cuda_activation

# Lives as long as some layer holds the buffer; the key holds the group, so that its identity is not reused meanwhile.
_buffers: WeakValueDictionary[tuple[Any, ...], Buffer] = WeakValueDictionary()
_names: WeakKeyDictionary[Buffer, str] = WeakKeyDictionary()  # the same on every rank


def shared_buffer(group: Group, **sizes: Any) -> Buffer:
    """The open buffer of this group and these sizes, made if some rank has none. Collective.

    A rank may still hold a buffer that is garbage on its peers, or already closed there; so ranks compare first.

    Args:
        group, sizes: as moe_rt.Buffer's.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    key = (group, *sorted(sizes.items()))
    found = _buffers.get(key)
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
        if found is not None:  # a rank on which a layer could not be made has counted one more, or one less
            found.reserve_tags(max(int(record["tag"]) for record in everyone))
        name = str(everyone[0].get("next"))
    if found is None:
        found = _buffers[key] = Buffer(group, **sizes)
        _names[found] = name
    return found


class LayerBuffers:
    """The buffers of one layer: one for each dtype that its rows have had. A copied layer shares them.

    A pickle leaves them behind, and they are made anew, collectively, at first use. Memory of a group cannot travel,
    nor can a group. So a layer pickles if another process finds its group without being told: it is of a single rank,
    or of the default process group. Others refuse, saying what to do instead.

    Args:
        group, sizes: as of `shared_buffer`; sizes["dtype"] is that of the first.
        fixed: all rows have the first one's dtype.
        has_kernel: experts run kernels that are compiled for each dtype on CUDA.
        first: take this one instead of making it.

    Attributes:
        fixed: the dtype of all rows, or None if they follow.
        tag: the layer's.
    """

    def __init__(
        self, group: Group, sizes: dict[str, Any], *, fixed: bool, has_kernel: bool, first: Buffer | None
    ) -> None:
        self._group = dist.group.WORLD if group is None and dist.is_initialized() else group
        self._sizes, self._has_kernel = sizes, has_kernel
        buffer = self._prepared(shared_buffer(group, **sizes) if first is None else first)
        self._place = buffer.rank, buffer.num_ranks, buffer.device.type
        over_default = buffer.process_group is not None and buffer.process_group is dist.group.WORLD
        self._travels = buffer.num_ranks == 1 or (over_default and not isinstance(group, DeviceMesh))
        self.tag = buffer.new_tag()
        self._dtype: torch.dtype = buffer.spec.dtype
        self.fixed = self._dtype if fixed else None
        self._by_dtype, self._used, self._warned = {self._dtype: buffer}, False, False

    @property
    def current(self) -> Buffer:
        """The one that the last forward asked for, or the first. Collective where a pickle has left it behind.

        Raises:
            InvalidConfig: this process is not the rank that the layer's experts belong to.
            As moe_rt.Buffer.
        """
        if self._dtype not in self._by_dtype:
            self._by_dtype[self._dtype] = self._make(self._dtype)
        return self._by_dtype[self._dtype]

    def use(self, dtype: torch.dtype) -> Buffer:
        """The buffer for rows of this dtype, or the fixed one. Collective where there is none yet."""
        self._open(dtype)
        return self._by_dtype[self.fixed or dtype]

    # Compilers call this while they trace, and keep no trace of it: it depends on nothing but the dtype, which they
    # guard. So a buffer is made before the graph that needs it runs.
    def _open(self, dtype: torch.dtype) -> None:
        if self.fixed is not None:
            self._compare(self.fixed, dtype)
            dtype = self.fixed
        if dtype not in self._by_dtype:
            if not self._used:  # made before model.to(dtype) or autocast: nobody will want its memory
                self._by_dtype.clear()
            self._by_dtype[dtype] = self._make(dtype)
        self._dtype, self._used = dtype, True

    # What torch.compiler.assume_constant_result does, after it has imported the compiler, which takes seconds.
    _open._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _make(self, dtype: torch.dtype) -> Buffer:
        rank, num_ranks, device = self._place
        group = self._group
        if group is None and num_ranks == 1:  # a layer that was made alone stays alone
            group = _alone(device)
        elif group is None and not dist.is_initialized():
            raise InvalidConfig(
                f"layer: got a pickle of rank {rank} of {num_ranks} in a process without a default process group, "
                "expected torch.distributed.init_process_group first"
            )
        buffer = shared_buffer(group, **{**self._sizes, "dtype": dtype})
        if (buffer.rank, buffer.num_ranks) != (rank, num_ranks):
            buffer.abort()  # for the ranks that are in their places
            raise InvalidConfig(
                f"layer: got a pickle of rank {rank} of {num_ranks} on rank {buffer.rank} of {buffer.num_ranks}, "
                "expected each rank to load its own; experts are spread anew as `moe-rt docs howto/resume` says"
            )
        buffer.reserve_tags(self.tag)
        return self._prepared(buffer)

    def _prepared(self, buffer: Buffer) -> Buffer:
        if buffer.device.type == "cuda" and self._has_kernel:
            cuda_activation.prepare(buffer.device, buffer.spec.dtype)
        return buffer

    def waited_ns(self) -> list[int]:
        """moe_rt.Buffer.waited_ns, added up over all of them."""
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
    """One rank, whatever the default process group is; the same for all layers, so that they share buffers."""
    return ThreadGroup.make(1, torch.device(device))[0]
