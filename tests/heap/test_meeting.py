"""The keys that rendezvous leave in a store, and a group of threads that survives a failed rendezvous."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.routing import buffer_kwargs, make_spec
from torch._C._distributed_c10d import Store

from moe_rt import Buffer, MoEConfig, MoELayer, ThreadGroup
from moe_rt.errors import CallOrderMismatch, ConcurrentUse, CorruptPeer, InvalidConfig, PeerDead, PeerTimeout, StoreLost
from moe_rt.group import meeting
from moe_rt.group.attendance import Attendance
from moe_rt.group.processes import watch
from moe_rt.group.rendezvous import Rendezvous, StoreRendezvous, all_gather_records

SIZE = 3


def clients(kind: str, path: Path) -> list[Store]:
    """Return a client of one store for each rank."""
    if kind == "hash":
        return [dist.HashStore()] * SIZE
    if kind == "file":
        return [dist.FileStore(str(path / "store"), -1) for _ in range(SIZE)]
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    tcp = [server, *(dist.TCPStore("localhost", server.port) for _ in range(SIZE - 1))]
    return [dist.PrefixStore("group", store) for store in tcp] if kind == "prefix" else tcp


def on_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_of_several_failures_the_first_counts() -> None:
    store = dist.HashStore()
    first, second, third = (meeting.Meeting(store, rank, SIZE) for rank in range(SIZE))
    second.fail(InvalidConfig("what came first"))
    third.fail(PeerTimeout("what follows from it"))
    with pytest.raises(InvalidConfig, match="what came first"):
        first.raise_first_failure()


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_keys_of_a_meeting_go_with_it(kind: str, tmp_path: Path) -> None:
    """A rendezvous deletes its keys, also if it failed on one rank, in any round of the others."""
    stores, counts = clients(kind, tmp_path), []
    own = stores[0].num_keys()  # FileStore has one key
    groups = [ThreadGroup(stores[rank], rank, SIZE, "cpu") for rank in range(SIZE)]
    good = buffer_kwargs(make_spec(SIZE))

    def make(rank: int, **changes: Any) -> None:
        try:
            Buffer(groups[rank], **{**good, **changes}).close()
        except InvalidConfig:
            assert changes or rank != 1

    for hidden in (good["hidden"], good["hidden"], 0, good["hidden"]):
        on_threads(lambda rank, hidden=hidden: make(rank, **({"hidden": hidden} if rank == 1 else {})))
        counts.append(stores[0].num_keys())
    del counts[2]  # a rendezvous that did not take place may leave a key until the next
    assert counts == [own + SIZE, own + SIZE, own + SIZE + 1], "a place for each rank, and a number once one has failed"


def test_an_interrupted_round_leaves_no_key() -> None:
    """An interrupted round leaves no key, although a rank that leaves early has not deleted its key of the previous
    round."""
    store = dist.HashStore()
    groups = [ThreadGroup(store, rank, SIZE, "cpu") for rank in range(SIZE)]
    failed = []

    def work(rank: int) -> None:
        try:
            with groups[rank] as group:
                group.all_gather("first", 60.0)
                if rank == 1:
                    raise KeyboardInterrupt
                group.all_gather("second", 60.0)
        except (KeyboardInterrupt, RuntimeError):
            failed.append(rank)

    on_threads(work)
    assert sorted(failed) == [0, 1, 2]
    assert store.num_keys() == SIZE


@pytest.mark.parametrize("error", [dist.DistNetworkError("the store is gone"), KeyboardInterrupt()], ids=repr)
def test_a_rank_that_could_not_come_comes_again(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Also from another thread."""

    def fail(self: Attendance) -> None:
        raise error

    group = Rendezvous(dist.HashStore(), 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Attendance, "come", fail)
        with pytest.raises((StoreLost, KeyboardInterrupt)):
            group.all_gather("", 60.0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(group.all_gather, "again", 60.0).result() == ["again"]


def test_one_thread_makes_a_buffer_as_a_rank() -> None:
    group = ThreadGroup.make(2)[0]
    raised: list[BaseException] = []

    def second() -> None:
        try:
            Buffer(group, **buffer_kwargs(make_spec(2)))
        except ConcurrentUse as error:
            raised.append(error)

    thread = threading.Thread(target=second)
    with group:
        thread.start()
        thread.join()
        another = threading.Thread(target=lambda: raised.append(refused(group)))
        another.start()
        another.join()
    assert [type(error) for error in raised] == [ConcurrentUse, ConcurrentUse]


def test_all_rendezvous_of_a_group_have_one_seat() -> None:
    """So one thread at a time makes a buffer, and what ended an attempt is known to the next."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        raised: list[BaseException] = []
        with StoreRendezvous(group):
            another = threading.Thread(target=lambda: raised.append(refused(StoreRendezvous(group))))
            another.start()
            another.join()
        assert [type(error) for error in raised] == [ConcurrentUse]
        assert StoreRendezvous(group)._seat is StoreRendezvous(group)._seat
    finally:
        dist.destroy_process_group()


def refused(group: Rendezvous) -> BaseException:
    with pytest.raises(ConcurrentUse) as raised, group:  # before it takes part in the other thread's meeting
        pass
    return raised.value


def test_a_process_that_ended_before_it_was_watched() -> None:
    """A process that ended before it was watched has ended; that must differ from a system that cannot open
    processes."""
    process = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(process, 0)
    assert watch(process).has_ended()


def test_a_rank_that_ended_long_ago_is_not_waited_for() -> None:
    store = dist.HashStore()
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    with ThreadGroup(store, 1, 2, "cpu"):
        pass
    place = json.loads(store.get("moe_rt/places/1")) | {"pid": process}
    store.set("moe_rt/places/1", json.dumps(place))
    with pytest.raises(PeerDead, match="the process of rank 1 ended"):
        Buffer(ThreadGroup(store, 0, 2, "cpu"), **buffer_kwargs(make_spec(2)))


class Clock:
    """Advances only by the pauses of a wait, and lets rank 1 join rounds of a rendezvous in `store`."""

    def __init__(self, store: Store, *comes: float) -> None:
        self.now, self._store, self._comes = 0.0, store, list(comes)
        self._peer: meeting.Meeting | None = None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._comes and self.now >= self._comes[0]:
            del self._comes[0]
            if self._peer is None:
                self._peer = meeting.Meeting(self._store, 1, 2)
                self._peer._find_name("{}")
            else:
                self._store.set(self._peer._keys(1)[1], "{}")


@pytest.mark.parametrize("comes", [(), (9.0,), (5.0, 9.0)], ids=str)
def test_one_timeout_for_all_rounds_of_a_meeting(monkeypatch: pytest.MonkeyPatch, comes: tuple[float, ...]) -> None:
    """One timeout covers all rounds: rank 1 is late again and again, and then stays away."""
    store = dist.HashStore()
    clock = Clock(store, *comes)
    monkeypatch.setattr(meeting, "time", clock)
    group = ThreadGroup(store, 0, 2, "cpu")
    with group:
        for _ in comes:
            group.all_gather("{}", 10.0)
        said = "came, and did not go on" if comes else "did not come to make a buffer"
        with pytest.raises(PeerTimeout, match=rf"ranks \[1\] {said} within 10 s"):
            group.all_gather("{}", 10.0)
    assert 10.0 < clock.now < 10.2


SINGLE = dict(num_max_tokens_per_rank=4, hidden=8, num_topk=1, num_experts=2, dtype=torch.float32)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"},
    ],
    ids=lambda v: next(iter(v)),
)
def test_one_of_several_is_no_group_of_one(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfig, match=r"no process group with .*, expected .*init_process_group\(\) first"):
        Buffer(None, **SINGLE)
    with pytest.raises(InvalidConfig, match="no process group with"):
        MoELayer(MoEConfig(hidden=8, intermediate=8, num_experts=2, num_topk=1, num_max_tokens_per_rank=4))
    Buffer(ThreadGroup.make(1)[0], **SINGLE).close()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the shell of an allocation, or a batch script
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=str,
)
def test_a_process_by_itself_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Buffer(None, **SINGLE).close()


def test_errors_of_records_name_the_ranks() -> None:
    """The rank that raises, and the first whose record or purpose is another."""

    class Gathered(Rendezvous):
        def all_gather(self, payload: str, timeout_s: float) -> list[str]:
            asked.append((json.loads(payload), timeout_s))
            return texts

    asked: list[Any] = []
    rank = Gathered(dist.HashStore(), 1, 3)
    texts = ['{"a": 1, "to": "map"}', '{"a": 2}', '{"to": "map"}']
    found = all_gather_records(rank, {"a": 2}, 7.5, "map")
    assert found == [{"a": 1}, {"a": 2}, {}], "a record without a purpose has this rank's"
    assert asked == [({"a": 2, "to": "map"}, 7.5)]
    texts = ["{}"] * 3
    all_gather_records(rank, {}, 1.0)
    assert asked[1] == ({"to": "exchange records"}, 1.0)
    for text in ("[1]", "x", "[" * 10**5, "3", "null"):
        texts = ["{}", "{}", text]
        with pytest.raises(CorruptPeer) as corrupt:
            all_gather_records(rank, {}, 1.0)
        assert (corrupt.value.rank, corrupt.value.peer) == (1, 2)
        said = f"rendezvous record of rank 2: got {text[:80]!r}, expected a JSON object"
        assert str(corrupt.value).split(" (moe-rt")[0] == said
    texts = ['{"to": "map"}', '{"to": "map"}', json.dumps({"to": "x" * 99})]
    with pytest.raises(CallOrderMismatch) as mismatch:
        all_gather_records(rank, {}, 1.0, "map")
    assert (mismatch.value.rank, mismatch.value.peer) == (1, 2)
    assert str(mismatch.value).split(" (moe-rt")[0] == f"rank 2 came to {'x' * 80}, expected to map as rank 0"


def test_a_second_thread_is_refused_within_a_meeting() -> None:
    """This thread may enter a meeting again, and another thread once the meeting is over."""
    rank, raised = Rendezvous(dist.HashStore(), 0, 1), list[Any]()

    def enter() -> None:
        try:
            with rank:
                raised.append(None)
        except ConcurrentUse as error:
            raised.append((error.rank, str(error).split(" (moe-rt")[0]))

    def in_a_thread() -> None:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(60.0)

    with rank as entered:
        assert entered is rank
        in_a_thread()
        with rank:
            in_a_thread()
        in_a_thread()
    in_a_thread()
    enter()
    said = "rank 0: another thread is making a buffer as this rank, expected one at a time"
    assert raised == [(0, said)] * 3 + [None] * 2


def test_a_destroyed_group_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        rendezvous = StoreRendezvous(group)
        assert (rendezvous.group, rendezvous.rank, rendezvous.size) == (group, 0, 1)
        assert StoreRendezvous(group)._seat is rendezvous._seat, "all rendezvous of a rank count as one"
        dist.destroy_process_group(group)
        with pytest.raises(
            InvalidConfig, match=r"^group: got a process group that was destroyed, expected a living one "
        ):
            StoreRendezvous(group)
    finally:
        dist.destroy_process_group()


class Pauses:
    """Time that passes only in sleeps."""

    def __init__(self) -> None:
        self.now, self.sleeps = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    made = Pauses()
    monkeypatch.setattr(meeting, "time", made)
    return made


def test_a_wait_looks_less_often_the_longer_it_lasts(clock: Pauses, capfd: pytest.CaptureFixture[str]) -> None:
    """It warns once after a tenth of its time, and each look is for the processes of a few of the missing ranks."""
    rank, looked = meeting.Meeting(dist.HashStore(), 3, 9), list[list[int]]()
    rank._me.watch_of = lambda r: looked[-1].append(r)  # type: ignore[method-assign]
    look = rank._look
    rank._look = lambda payload: looked.append([]) or look(payload)  # type: ignore[func-returns-value, method-assign]
    with pytest.raises(PeerTimeout) as raised:
        rank.gather("", 4.0)
    assert (raised.value.rank, raised.value.peer) == (3, 0)
    assert 4.0 < clock.now - 100.0 <= 4.05
    assert clock.sleeps[0] == 0.0002
    assert clock.sleeps[-1] == max(clock.sleeps) == 0.05
    passed = 0.0
    for seconds in clock.sleeps:
        assert seconds == pytest.approx(min(0.0002 + passed / 8, 0.05))
        passed += seconds
    assert all(len(ranks) == len(set(ranks)) == 4 for ranks in looked)
    assert {r for ranks in looked for r in ranks} == set(range(9))
    (warning,) = capfd.readouterr().err.splitlines()
    waited = float(warning.split()[5])
    assert 0.4 < waited <= 0.45
    assert warning.endswith(" s for ranks [0, 1, 2, 4, 5, 6, 7, 8] to make a buffer; PeerTimeout after 4 s")


def test_a_wait_of_no_time_looks_twice(clock: Pauses, capfd: pytest.CaptureFixture[str]) -> None:
    rank = meeting.Meeting(dist.HashStore(), 0, 2)
    with pytest.raises(PeerTimeout):
        rank.gather("", 0.0)
    assert clock.sleeps == [0.0002]
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_warning_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    err = SimpleNamespace(write=did.append, flush=lambda: did.append("flushed"))
    monkeypatch.setattr(meeting.sys, "stderr", err)
    meeting.warn(3, 1.23456, [0, 2], 20.0)
    said = "moe_rt: rank 3 has waited 1.23 s for ranks [0, 2] to make a buffer; PeerTimeout after 20 s"
    assert "".join(did) == f"{said}\nflushed"
