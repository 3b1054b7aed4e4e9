"""What may be given as a group of ranks, and where its ranks meet."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.errors import InvalidConfig
from moe_rt.heap.launchers import one_of_several
from moe_rt.heap.rendezvous import Rendezvous, StoreRendezvous, ThreadGroup

Group = dist.ProcessGroup | DeviceMesh | ThreadGroup | None


def rendezvous_of(group: Group) -> Rendezvous:
    """Where the ranks of a group meet; None is the default group, or a single rank where there is none.

    Raises:
        InvalidConfig: it is no group, this rank is not a member, or a launcher started others and there is no group.
    """
    if isinstance(group, ThreadGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidConfig(f"group: got a mesh of {group.ndim} dimensions, expected one, as in mesh['ep']")
        if group.get_coordinate() is None:
            raise InvalidConfig("group: got a mesh that this rank is not a part of, expected a member")
        group = group.get_group()
    if group is None:
        if not dist.is_initialized():
            if others := one_of_several():
                expected = "torch.distributed.init_process_group() first, or ThreadGroup.make(1)[0] for this rank alone"
                raise InvalidConfig(f"group: got None and no process group beside {others}, expected {expected}")
            return ThreadGroup.make(1)[0]
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives those that it leaves out
            raise InvalidConfig("group: got one that this rank is not a member of, expected a member")
        raise InvalidConfig(f"group: got {type(group).__name__}, expected a ProcessGroup, DeviceMesh or ThreadGroup")
    return StoreRendezvous(group)
