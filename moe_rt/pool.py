"""Buffers shared by the layers of a group: symmetric memory is paid once per size, not once per layer."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from moe_rt.buffer import Buffer
from moe_rt.errors import InvalidConfig
from moe_rt.heap.groups import Group
from moe_rt.heap.rendezvous import ThreadGroup

# Lives as long as some layer holds the buffer; the key holds the group, so that its identity is not reused meanwhile.
_buffers: WeakValueDictionary[tuple[Any, ...], Buffer] = WeakValueDictionary()


def shared_buffer(group: Group, **sizes: Any) -> Buffer:
    """The open buffer of this group and these sizes, made collectively if there is none. Arguments: moe_rt.Buffer's."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    key = (group, *sorted(sizes.items()))
    buffer = _buffers.get(key)
    if buffer is None or buffer.closed:
        buffer = _buffers[key] = Buffer(group, **sizes)
    return buffer


class LayerBuffer:
    """A layer's buffer. A copy of the layer shares it; a pickle leaves it behind, and it is made anew at first use.

    Memory of a group cannot travel, nor can a group. So a layer pickles if another process finds its group without
    being told: it is of a single rank, or of the default process group. Others refuse, saying what to do instead.

    Args:
        buffer: what the layer uses.
        sizes: see `shared_buffer`.
        tag: the layer's.
    """

    def __init__(self, buffer: Buffer, sizes: dict[str, Any], tag: int) -> None:
        self._buffer: Buffer | None = buffer
        self._sizes, self._tag = sizes, tag
        self._place = buffer.rank, buffer.num_ranks, buffer.device.type

    @property
    def buffer(self) -> Buffer:
        """Made collectively if a pickle has left it behind.

        Raises:
            InvalidConfig: this process is not the rank that the layer's experts belong to.
            As moe_rt.Buffer.
        """
        if self._buffer is None:
            self._buffer = self._made_anew()
        return self._buffer

    def _made_anew(self) -> Buffer:
        rank, num_ranks, device = self._place
        if num_ranks > 1 and not dist.is_initialized():
            raise InvalidConfig(
                f"layer: got a pickle of rank {rank} of {num_ranks} in a process without a default process group, "
                "expected torch.distributed.init_process_group first"
            )
        buffer = shared_buffer(_alone(device) if num_ranks == 1 else None, **self._sizes)
        if (buffer.rank, buffer.num_ranks) != (rank, num_ranks):
            buffer.abort()  # for the ranks that are in their places
            raise InvalidConfig(
                f"layer: got a pickle of rank {rank} of {num_ranks} on rank {buffer.rank} of {buffer.num_ranks}, "
                "expected each rank to load its own; experts are spread anew by docs/howto/resume.md"
            )
        while buffer.new_tag() < self._tag:  # no layer that is made later may be given this one's
            pass
        return buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerBuffer:
        return self

    def __getstate__(self) -> dict[str, Any]:
        group = None if self._buffer is None else self._buffer.process_group
        is_default = group is not None and dist.is_initialized() and group is dist.group.WORLD
        if self._buffer is not None and self._place[1] > 1 and not is_default:
            raise InvalidConfig(
                f"pickle: got a layer over {'threads' if group is None else 'a process group of its own'}, expected "
                "one of a single rank or of the default process group; save its state_dict() instead, and load that "
                "into a layer made with MoELayer(config, group)"
            )
        return {**self.__dict__, "_buffer": None}


@functools.cache
def _alone(device: str) -> ThreadGroup:
    """One rank, whatever the default process group is; the same for all layers, so that they share buffers."""
    return ThreadGroup.make(1, torch.device(device))[0]
