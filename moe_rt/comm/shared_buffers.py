"""Buffers shared by the layers of a group, so that each size and dtype takes symmetric memory only once."""

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

# An entry lives as long as a layer holds its buffer. The key holds the group, so its identity is not reused meanwhile.
_buffers: WeakValueDictionary[tuple[Any, ...], Buffer] = WeakValueDictionary()
_names: WeakKeyDictionary[Buffer, str] = WeakKeyDictionary()  # the same on every rank


def shared_buffer(group: Group, **sizes: Any) -> Buffer:
    """Return the open buffer of this group and these sizes; make one if some rank has none. Collective.

    A rank may still hold a buffer that its peers have freed or closed, so ranks compare theirs first.

    Args:
        group, sizes: the arguments of moe_rt.Buffer.

    Raises:
        MoeRtError: see moe_rt.Buffer.
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
        if found is not None:  # a rank on which a layer could not be made has another count
            found.reserve_tags(max(int(record["tag"]) for record in everyone))
        name = str(everyone[0].get("next"))
    if found is None:
        found = _buffers[key] = Buffer(group, **sizes)
        _names[found] = name
    return found


class LayerBuffers:
    """Buffers of one layer: one for each dtype that its rows have had. A copied layer shares them.

    A pickle omits them, and the first use makes new ones, collectively: neither a group nor its memory can be pickled.
    So a layer pickles only if another process can find its group: a single rank or the default process group. Other
    layers refuse, with a message that says what to do instead.

    Args:
        group, sizes: see `shared_buffer`; sizes["dtype"] is the dtype of the first buffer.
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
        buffer = shared_buffer(group, **{**self._sizes, "dtype": dtype})
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
