"""Kinds of groups that callers may pass, and the rendezvous of each."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group

from moe_rt.config.topology import Topology
from moe_rt.errors import InvalidConfig
from moe_rt.heap.gloo_end import rest_at_exit
from moe_rt.heap.launchers import one_of_several
from moe_rt.heap.rendezvous import StoreRendezvous, ThreadGroup

Group = dist.ProcessGroup | DeviceMesh | ThreadGroup | None

# Names of the groups made for two-dimensional meshes, by their ranks. A destroyed group loses its name.
_names: dict[tuple[int, ...], Any] = {}


def rendezvous_of(group: Group) -> StoreRendezvous | ThreadGroup:
    """Return the rendezvous of a group; None is the default group, or a single rank if no default group exists.

    A mesh of two dimensions represents all its ranks; the first dimension's indices are their nodes.

    Raises:
        InvalidConfig: it is no group, this rank is not a member, or a launcher started several ranks without a group.
    """
    if isinstance(group, ThreadGroup):
        return group
    rest_at_exit()
    if isinstance(group, DeviceMesh):
        members = process_group_of(group)
        if group.ndim == 1:
            return StoreRendezvous(members)
        return StoreRendezvous(members, Topology.from_rows(group.mesh.tolist(), dist.get_process_group_ranks(members)))
    if group is None:
        if not dist.is_initialized():
            if others := one_of_several():
                expected = "torch.distributed.init_process_group() first, or ThreadGroup.make(1)[0] for a single rank"
                raise InvalidConfig(f"group: got None and no process group with {others}, expected {expected}")
            return ThreadGroup.make(1)[0]
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # returned by new_group to ranks that it leaves out
            raise InvalidConfig("group: got one that this rank is not a member of, expected a member")
        raise InvalidConfig(f"group: got {type(group).__name__}, expected a ProcessGroup, DeviceMesh or ThreadGroup")
    return StoreRendezvous(group)


def process_group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh, in ascending order. Meshes of the same ranks share one.

    The first use of a two-dimensional mesh is collective over its ranks only.

    Raises:
        InvalidConfig: this rank is not a member, or the mesh has more dimensions.
    """
    if mesh.ndim not in (1, 2):
        expected = "one, as in mesh['ep'], or two: nodes, and the ranks of a node"
        raise InvalidConfig(f"group: got a mesh of {mesh.ndim} dimensions, expected {expected}")
    if mesh.get_coordinate() is None:
        raise InvalidConfig("group: got a mesh that this rank is not a part of, expected a member")
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return _get_default_group()
    try:
        return _resolve_process_group(_names[ranks])
    except (KeyError, RuntimeError):  # not made yet, or destroyed
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        _names[ranks] = group.group_name
        return group
