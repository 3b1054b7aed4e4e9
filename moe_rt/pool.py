"""Buffers shared by the layers of a group: symmetric memory is paid once per size, not once per layer."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from moe_rt.buffer import Buffer
from moe_rt.heap.groups import Group

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
