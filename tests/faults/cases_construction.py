"""Rank functions for tests of buffers that cannot be made; each returns what its rank saw, and the time it took."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.cases_faults import good_round, open_buffer
from support.routing import buffer_kwargs, make_spec
from torch.distributed.device_mesh import DeviceMesh

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.errors import InvalidConfig, MoeRtError
from moe_rt.group.groups import rendezvous_of
from moe_rt.memory import shm

FAULTY_RANK = 1
Seen = tuple[str, float]


class Interrupting:
    """Raises as a user's Ctrl-C would while this rank makes its configuration."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt


def rank_of(group: Any) -> int:
    return group.rank if isinstance(group.rank, int) else group.rank()


def seen_by(work: Callable[[], Any]) -> Seen:
    """Return the class and message of what `work` raised, and the seconds it took."""
    start, text = time.monotonic(), "no error"
    try:
        work()
    except (Exception, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - start


def use(group: Any) -> None:
    with open_buffer(group) as buffer:
        good_round(buffer)


def wrong_argument(group: Any, name: str, value: Any) -> Seen:
    """The faulty rank makes its buffer with this value; afterwards the same group makes a good one."""
    changes = {name: value} if rank_of(group) == FAULTY_RANK else {}
    seen = seen_by(lambda: open_buffer(group, **changes).close())
    use(group)
    return seen


def interrupted(group: Any) -> Seen:
    return wrong_argument(group, "placement", Interrupting())


def same_argument(group: Any, name: str, value: Any) -> Seen:
    """All ranks make their buffer with this value."""
    seen = seen_by(lambda: open_buffer(group, **{name: value}).close())
    use(group)
    return seen


def wrong_isa(group: Any) -> Seen:
    """Only the engine checks this value, when the segments exist."""
    if rank_of(group) == FAULTY_RANK:
        os.environ["MOE_RT_ISA"] = "pdp11"
    seen = seen_by(lambda: open_buffer(group).close())
    os.environ.pop("MOE_RT_ISA", None)
    use(group)
    return seen


def mapped_after_wrong_isa(group: Any) -> int:
    """Return the number of mapped segments while the error of a failed attempt is still referenced."""
    if rank_of(group) == FAULTY_RANK:
        os.environ["MOE_RT_ISA"] = "pdp11"
    with pytest.raises(InvalidConfig) as kept:
        open_buffer(group)
    os.environ.pop("MOE_RT_ISA", None)
    mapped = sum("/memfd:moe_rt" in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert kept.value.__traceback__ is not None
    return mapped


def come_late_to_map(patch: pytest.MonkeyPatch) -> None:
    """Map late, when the segment of a failed rank no longer exists."""
    real = shm._attach_all

    def late(*args: Any) -> None:
        time.sleep(1.0)
        real(*args)

    patch.setattr(shm, "_attach_all", late)


def killed_while_mapping(group: Any) -> Seen:
    """One peer finds the faulty rank's segment gone; the other has mapped it."""

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if rank_of(group) == FAULTY_RANK:
            patch.setattr(shm, "_attach_all", die)
        elif rank_of(group) == 0:
            come_late_to_map(patch)
        return seen_by(lambda: open_buffer(group).close())


def no_room_for_peers(group: Any) -> Seen:
    """The faulty rank's segment fits into its address space; the next one does not."""
    real, calls = shm.mmap.mmap, []

    def scarce(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        if rank_of(group) == FAULTY_RANK:
            patch.setattr(shm, "mmap", SimpleNamespace(mmap=scarce))
        elif rank_of(group) == 0:
            come_late_to_map(patch)
        seen = seen_by(lambda: open_buffer(group).close())
    use(group)
    return seen


def too_large(group: Any) -> Seen:
    """Segments of 64 TiB: three do not fit into 47 bits of addresses, however much memory is overcommitted."""
    spec = make_spec(group.size, num_max_tokens_per_rank=2**22, hidden=2**20, num_topk=1)
    seen = seen_by(lambda: open_buffer(group, spec).close())
    use(group)
    return seen


def interrupted_in_a_wait(group: Any) -> Seen:
    """Interrupt (Ctrl-C) a rank that waits for its peers, which arrive after it has left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rendezvous, key = rendezvous_of(group), "test/interrupted_in_a_wait"

    def interrupt() -> None:
        while not rendezvous._seat.attendance.ticket_of(FAULTY_RANK):
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    if rank_of(group) == FAULTY_RANK:
        threading.Thread(target=interrupt, daemon=True).start()
    while rank_of(group) != FAULTY_RANK and not rendezvous._store.add(key, 0):
        time.sleep(0.01)
    seen = seen_by(lambda: open_buffer(group).close())
    if rank_of(group) == FAULTY_RANK:
        rendezvous._store.add(key, 1)
    use(group)
    return seen


def stays_away(group: Any, times: int) -> list[Seen]:
    """The faulty rank misses `times` buffers, and all ranks make a good one afterwards."""
    store, key, seen = rendezvous_of(group)._store, f"test/stays_away/{times}", []
    if rank_of(group) != FAULTY_RANK:
        for _ in range(times):
            seen.append(seen_by(lambda: open_buffer(group, init_timeout_s=0.5).close()))
        store.add(key, 1)
    while rank_of(group) == FAULTY_RANK and store.add(key, 0) < 2:
        time.sleep(0.01)
    use(group)
    return seen


def stays_away_from_a_layer(group: Any) -> list[Seen]:
    """The faulty rank misses a layer, whose creation rendezvouses several times."""
    config = MoEConfig(
        hidden=8, intermediate=8, num_experts=3, num_topk=1, num_max_tokens_per_rank=4, init_timeout_s=0.5
    )
    seen = [seen_by(lambda: MoELayer(config, group))] if rank_of(group) != FAULTY_RANK else []
    dist.barrier(group)
    layer = MoELayer(replace(config, init_timeout_s=60.0), group)
    layer(torch.randn(4, 8))[0].sum().backward()
    return seen


def overlapping_groups(group: Any) -> list[Seen]:
    """The faulty rank belongs to both groups, and misses the first buffer over one of them."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = [g for g in groups if isinstance(g, dist.ProcessGroup)]
    seen = []
    if rank_of(group) == 0:
        seen.append(seen_by(lambda: open_buffer(groups[0], make_spec(2), init_timeout_s=0.5).close()))
    dist.barrier(group)
    for some in mine:
        open_buffer(some, make_spec(2)).close()
    return seen


def killed_while_making(group: Any) -> Seen:
    """Make the first buffer of this group; the faulty rank is killed after its configuration."""
    os.environ["MOE_RT_FAULT"] = f"rank={FAULTY_RANK},at=pre_rendezvous,do=kill"
    return seen_by(lambda: open_buffer(group).close())


def killed_before_the_second(group: Any) -> Seen:
    """The faulty rank has made one buffer, and exits long before the others make another."""
    use(group)
    if rank_of(group) == FAULTY_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.0)
    return seen_by(lambda: open_buffer(group).close())


def store_ends(group: Any) -> Seen:
    """Rank 0 serves the store, and exits while the others wait for it."""
    first = dist.distributed_c10d._get_process_group_store(group)
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        served = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        first.set("port", str(served.port))
    else:
        served = dist.TCPStore("localhost", int(first.get("port")), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=served, rank=rank, world_size=size)
    first.add("test/store_ends", 1)
    if rank == 0:
        while first.add("test/store_ends", 0) < size:
            time.sleep(0.01)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    return seen_by(lambda: open_buffer(dist.group.WORLD).close())


def crossed_threads(group: Any) -> list[Seen]:
    """Two threads make a buffer each, on separate groups; the order differs between the ranks."""
    groups = [dist.new_group(), dist.new_group()]
    seen: list[Seen] = [("did not finish", 0.0)] * 2

    def make(which: int) -> None:
        time.sleep(1.5 * (which != group.rank()))
        seen[which] = seen_by(lambda: use(groups[which]))

    threads = [threading.Thread(target=make, args=(which,), daemon=True) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600.0)
    return seen


def one_left_out(group: Any, by_mesh: bool) -> str:
    """Return the error of the rank that `new_group` or a mesh leaves out."""
    some: Any = DeviceMesh("cpu", [0]) if by_mesh else dist.new_group([0])
    try:
        Buffer(some, **buffer_kwargs(make_spec(1))).close()
    except MoeRtError as error:
        return str(error)
    return "no error"


def destroyed(group: Any) -> str:
    some = dist.new_group()
    use(some)
    dist.destroy_process_group(some)
    try:
        use(some)
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
