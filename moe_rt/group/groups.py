"""Kinds of groups that callers may pass, the rendezvous of each, and what torch's groups need at the end of Python."""

from __future__ import annotations

import atexit
import functools
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group

from moe_rt.config.topology import Topology
from moe_rt.errors import InvalidConfig
from moe_rt.group.rendezvous import StoreRendezvous, ThreadGroup

Group = dist.ProcessGroup | DeviceMesh | ThreadGroup | None

# Names of the groups made for two-dimensional meshes, by their ranks. A destroyed group loses its name.
_names: dict[tuple[int, ...], Any] = {}

# Variables with the rank and the number of ranks, by launcher. Both must be set: one may be inherited from a shell, as
# SLURM_NTASKS is in an interactive allocation. SLURM_STEP_NUM_TASKS is set only in processes that srun started.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
_GLOO_THREAD, _GLOO_PATIENCE_S = "pt_gloo_runloop", 10.0


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


def one_of_several() -> str:
    """Describe what shows that a launcher started this process as one of several; "" if nothing does.

    Example: "WORLD_SIZE = 4 and RANK = 1, as torchrun sets them".
    """
    for launcher, (rank, size) in _LAUNCHERS.items():
        number = os.environ.get(size, "")
        if rank in os.environ and number.isdecimal() and int(number) > 1:
            return f"{size} = {number} and {rank} = {os.environ[rank]}, as {launcher} sets them"
    return ""


@functools.cache
def rest_at_exit() -> None:
    """Make the end of Python wait until gloo's threads are idle, for at most ten seconds.

    A gloo thread refers to the tensors of an operation slightly longer than the operation lasts. If its reference is
    the last one and the interpreter ends meanwhile, Python before 3.14 ends the thread inside C++ code that must not be
    left this way, and the process aborts ("terminate called without an active exception") after all its work was done:
    https://github.com/pytorch/pytorch/pull/179291. destroy_process_group() ends the threads only if nothing else refers
    to the group; DDP and the caches of DTensor do.
    """
    atexit.register(_await_gloo)


def _await_gloo() -> None:
    deadline = time.monotonic() + _GLOO_PATIENCE_S
    before, now = None, _gloo_threads()
    while now and not (now == before and all(state == "S" for state, *_ in now.values())):
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)  # releases the interpreter's lock: a thread that waits for it runs
        before, now = now, _gloo_threads()


def _gloo_threads() -> dict[str, tuple[str, str, str]]:
    """State and context-switch counts of each gloo thread; those of an idle thread do not change.

    Those of a thread that waits for the interpreter's lock or a core do: it ran in between, or its state is not "S".
    """
    looks = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            lines = (thread / "status").read_text().splitlines()
        except OSError:
            continue  # it has ended
        of = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if of["Name"] == _GLOO_THREAD:
            looks[thread.name] = (of["State"][0], of["voluntary_ctxt_switches"], of["nonvoluntary_ctxt_switches"])
    return looks
