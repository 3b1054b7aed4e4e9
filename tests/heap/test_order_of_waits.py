"""Heaps wait in the right order: for work of the GPU before memory is read or reused, and for peers over UCX."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from heap.fake_nvshmem import Core, HostGpu
from heap.nvshmem_job import Job, release
from support.ranks import ThreadRanks
from support.routing import make_spec

from moe_rt.errors import InvalidConfig, PeerTimeout
from moe_rt.memory import shm, ucx
from moe_rt.memory.segments import Segments


class NotingGpu(HostGpu):
    """Notes each wait among the calls of its process's NVSHMEM."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core

    def synchronize(self) -> None:
        super().synchronize()
        self.core.note("synchronize")


def test_nvshmem_waits_for_the_gpu_around_everything_that_is_queued_there() -> None:
    job = Job(2)
    job.gpus = [NotingGpu(core) for core in job.cores]

    def calls(since: int, *kinds: str) -> list[str]:
        return [name for process, name, _ in job.cluster.calls[since:] if process == 0 and name in kinds]

    made = job.allocate(100)
    assert calls(0, "buffer", "synchronize") == ["synchronize", "buffer", "synchronize"], (
        "it is zero when it is handed out"
    )
    since = len(job.cluster.calls)
    more = job.allocate(5000)
    assert calls(since, "quiet", "buffer", "synchronize") == [
        "synchronize",  # kernels have issued their puts
        "quiet",
        "synchronize",  # and these are done
        "buffer",
        "synchronize",
    ]
    release([*made, *more])
    since = len(job.cluster.calls)
    assert job.shutdown() == [True, True]
    assert calls(since, "synchronize", "free", "finalize") == ["synchronize", "free", "free", "finalize"]


class Network:
    """A connection that is flushed after some looks."""

    def __init__(self, looks: dict[int, int], lost: tuple[int, ...] = ()) -> None:
        self.looks, self._lost = dict(looks), lost
        self.slept: list[float] = []

    def flushed(self, peer: int) -> bool:
        self.looks[peer] -= 1
        return self.looks[peer] < 0

    def lost(self, peer: int) -> bool:
        return peer in self._lost

    def problem(self, peer: int) -> str:
        return f"no route to {peer}"


def connected(monkeypatch: pytest.MonkeyPatch, network: Network, timeout_s: float = 100.0) -> tuple[list[Any], int]:
    """Return warnings, and how often the group's failures were looked for."""
    warned: list[Any] = []
    failures = itertools.count()
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(ucx, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=network.slept.append))
    monkeypatch.setattr(ucx, "warn", lambda *given: warned.append(given))
    group: Any = SimpleNamespace(rank=1, raise_first_failure=lambda: next(failures))
    segments = Segments([0, 4096, 0], [None] * 3, [None] * 3, network=network)
    ucx._await_connections(group, segments, timeout_s)
    return warned, next(failures)


def test_each_remote_peer_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network({0: 3, 2: 2})
    assert connected(monkeypatch, network) == ([], 5)
    assert network.looks == {0: -1, 2: -1}, "the own segment has an address, and needs no connection"
    assert network.slept == [ucx._PAUSE_S] * 5, "peers on this core need it"


def test_a_warning_comes_once_after_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connected(monkeypatch, Network({0: 0, 2: 10}))[0] == [], "a tenth, exactly"
    assert connected(monkeypatch, Network({0: 0, 2: 20}))[0] == [(1, 11.0, [2], 100.0)]
    assert connected(monkeypatch, Network({0: 20, 2: 20}))[0] == [(1, 11.0, [0], 100.0)]


def test_a_peer_that_is_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, Network({0: 0, 2: 100}))
    for looks in ({0: 0, 2: 101}, {0: 60, 2: 60}):  # one limit for all peers
        with pytest.raises(
            PeerTimeout, match="rank 1 did not reach rank 2 over UCX within 100 s; UCX_NET_DEVICES"
        ) as raised:
            connected(monkeypatch, Network(looks))
        assert (raised.value.rank, raised.value.peer) == (1, 2)


def test_a_connection_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match='rank 1 cannot reach rank 2: got "no route to 2" from UCX') as raised:
        connected(monkeypatch, Network({0: 1, 2: 1}, lost=(2,)))
    assert (raised.value.rank, raised.value.peer) == (1, 2)


class FakeNetwork:
    """UCX of a rank, which refuses connections to some peers."""

    made: list[weakref.ref[FakeNetwork]]
    refuses: set[tuple[int, int]]  # rank, peer
    connected: list[tuple[int, int, bytes, int]]

    def __init__(self, *, library: str, descriptor: int, shape: Any, rank: int) -> None:
        self._rank = rank
        self.made.append(weakref.ref(self))

    def address(self) -> bytes:
        return f"address {self._rank}".encode()

    def secret(self) -> int:
        return 40 + self._rank

    @property
    def connect(self) -> Callable[..., None]:
        rank, refuses, connected = self._rank, self.refuses, self.connected

        def connect(*, peer: int, address: bytes, secret: int) -> None:  # its frame does not hold the network
            if (rank, peer) in refuses:
                raise RuntimeError("no such device")
            connected.append((rank, peer, address, secret))

        return connect

    def flushed(self, peer: int) -> bool:
        return True

    def lost(self, peer: int) -> bool:
        return False


def of_hosts(monkeypatch: pytest.MonkeyPatch, hosts: str, refuses: set[tuple[int, int]]) -> list[Any]:
    """Return the ranks' FakeNetworks, and each rank's segments, or its error.

    hosts[r] is the host of rank r, a thread of this process.
    """
    here = lambda: {"where": hosts[int(threading.current_thread().name.split()[-1])], "pid": os.getpid()}  # noqa: E731
    kind = type("Fake", (FakeNetwork,), {"made": [], "refuses": refuses, "connected": []})
    monkeypatch.setattr(ucx, "_engine", SimpleNamespace(UcxNetwork=kind, ucx_version=lambda name: "1.18.0"))
    monkeypatch.setattr(ucx, "library", lambda: "libucp")
    monkeypatch.setattr(ucx, "place", here)
    shape = make_spec(len(hosts)).shape()
    found = ThreadRanks(len(hosts)).outcomes(lambda group: ucx.allocate(group, shape, 60.0))
    return [kind, *found]


@pytest.mark.parametrize("hosts", ["AAB", "ABA", "BAA", "ABC"])
def test_ranks_map_their_host_and_connect_to_the_others(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    kind, *found = of_hosts(monkeypatch, hosts, set())
    remote = {(r, p) for r, p in itertools.permutations(range(3), 2) if hosts[r] != hosts[p]}
    assert sorted(kind.connected) == sorted((r, p, f"address {p}".encode(), 40 + p) for r, p in remote)
    for r, segments in enumerate(found):
        mapped = [bool(address) for address in segments.addresses]
        assert mapped == [hosts[p] == hosts[r] for p in range(3)]
        assert [m is not None for m in segments.mappings] == mapped
        own = [pid == os.getpid() and inode > 0 for pid, inode in segments.members]
        assert own == mapped
        assert [member for member, is_mapped in zip(segments.members, mapped, strict=True) if not is_mapped] == [
            (0, 0)
        ] * mapped.count(False)
        assert [watched is not None for watched in segments.watches] == [mapped[p] and p != r for p in range(3)]
        segments.release()


@pytest.mark.parametrize("refuses", [{(2, 0)}, {(0, 2)}, {(1, 2), (2, 1)}], ids=str)
def test_a_refused_connection_leaves_nothing_on_any_rank(
    monkeypatch: pytest.MonkeyPatch, refuses: set[tuple[int, int]]
) -> None:
    of_hosts(monkeypatch, "AAB", refuses)  # whatever is opened once
    gc.collect()  # objects of earlier tests may hold descriptors
    before = len(os.listdir("/proc/self/fd"))
    kind, *errors = of_hosts(monkeypatch, "AAB", refuses)
    faulty = {rank for rank, _ in refuses}
    for rank, error in enumerate(errors):
        assert isinstance(error, InvalidConfig), error
        assert 'heap "ucx": got "no such device"' in str(error)
        assert rank in faulty or error.peer in faulty
    assert len(kind.made) == 3
    assert [made() for made in kind.made] == [None] * 3, "errors that are kept keep no network"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("hosts", ["AAA", "AAB"])
def test_all_look_for_room_for_their_host_before_any_takes_memory(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    called: list[Any] = []
    make = shm.make_segment
    monkeypatch.setattr(shm, "look_for_room", lambda size, rank: called.append((rank, size)) or {})
    monkeypatch.setattr(shm, "make_segment", lambda *given: called.append("make") or make(*given))
    num_bytes = make_spec(3).shape().segment_bytes()
    _, *found = of_hosts(monkeypatch, hosts, set())
    expected = [(rank, num_bytes * hosts.count(hosts[rank])) for rank in range(3)]
    assert sorted(called[:3]) == expected
    assert called[3:] == ["make"] * 3
    if len(set(hosts)) == 1:
        called.clear()
        found += ThreadRanks(3).outcomes(lambda group: shm.allocate(group, num_bytes, 60.0))
        assert sorted(called[:3]) == expected
        assert called[3:] == ["make"] * 3
    for segments in found:
        segments.release()


def test_segments_are_released_once() -> None:
    calls: list[int] = []
    segments = Segments([], [], [], on_release=lambda: calls.append(1))
    segments.release()
    segments.release()
    del segments
    assert calls == [1]
