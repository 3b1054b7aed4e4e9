"""Heaps wait in the right order: for work of the GPU before memory is read or reused, and for peers over UCX."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from heap.fake_nvshmem import Core, HostGpu
from heap.nvshmem_job import Job, release

from moe_rt.errors import InvalidConfig, PeerTimeout
from moe_rt.memory import ucx
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
    monkeypatch.setattr(ucx, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None))
    monkeypatch.setattr(ucx, "warn", lambda *given: warned.append(given))
    group: Any = SimpleNamespace(rank=1, raise_first_failure=lambda: next(failures))
    segments = Segments([0, 4096, 0], [None] * 3, [None] * 3, network=network)
    ucx._await_connections(group, segments, timeout_s)
    return warned, next(failures)


def test_each_remote_peer_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network({0: 3, 2: 2})
    assert connected(monkeypatch, network) == ([], 5)
    assert network.looks == {0: -1, 2: -1}, "the own segment has an address, and needs no connection"


def test_a_warning_comes_once_after_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connected(monkeypatch, Network({0: 0, 2: 10}))[0] == [], "a tenth, exactly"
    assert connected(monkeypatch, Network({0: 0, 2: 20}))[0] == [(1, 11.0, [2], 100.0)]


def test_a_peer_that_is_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, Network({0: 0, 2: 100}))
    with pytest.raises(
        PeerTimeout, match="rank 1 did not reach rank 2 over UCX within 100 s; UCX_NET_DEVICES"
    ) as raised:
        connected(monkeypatch, Network({0: 0, 2: 101}))
    assert (raised.value.rank, raised.value.peer) == (1, 2)


def test_a_connection_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match='rank 1 cannot reach rank 2: got "no route to 2" from UCX') as raised:
        connected(monkeypatch, Network({0: 1, 2: 1}, lost=(2,)))
    assert (raised.value.rank, raised.value.peer) == (1, 2)
