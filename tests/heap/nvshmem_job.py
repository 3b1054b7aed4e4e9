"""Processes with NVSHMEM each, for tests: a World per process on the stand-in, and ranks that allocate together."""

from __future__ import annotations

from typing import Any

from heap.fake_nvshmem import Cluster, HostGpu
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.errors import MoeRtError
from moe_rt.memory import nvshmem
from moe_rt.memory.segments import Segments

TIMEOUT_S = 100.0


class Job:
    """A cluster's processes, each with its own World."""

    def __init__(self, size: int) -> None:
        self.cluster = Cluster(size)
        self.cores = self.cluster.cores
        self.worlds = [nvshmem.World(core.load) for core in self.cores]
        self.gpus = [HostGpu() for _ in range(size)]

    def outcomes(self, num_bytes: int, ranks: list[int] | None = None) -> list[Any]:
        """Allocate in the processes that are `ranks` of a group."""
        ranks = list(range(len(self.cores))) if ranks is None else ranks
        outcomes = ThreadRanks(len(ranks)).outcomes(allocate, self, ranks, num_bytes)
        assert not self.cluster.violations
        return outcomes

    def allocate(self, num_bytes: int, ranks: list[int] | None = None) -> list[Segments]:
        outcomes = self.outcomes(num_bytes, ranks)
        assert all(isinstance(o, Segments) for o in outcomes), outcomes
        return outcomes

    def refuse(self, kind: type[MoeRtError], num_bytes: int = 100, ranks: list[int] | None = None) -> str:
        """Check that every rank raises `kind` and says which rank it is; return the last one's message."""
        outcomes = self.outcomes(num_bytes, ranks)
        assert [type(o) for o in outcomes] == [kind] * len(outcomes), outcomes
        assert [o.rank for o in outcomes] == list(range(len(outcomes))), outcomes
        return str(outcomes[-1])

    def shutdown(self) -> list[Any]:
        outcomes = ThreadRanks(len(self.cores)).outcomes(shutdown, self)
        assert not self.cluster.violations
        return outcomes


def allocate(group: ThreadGroup, job: Job, ranks: list[int], num_bytes: int) -> Segments:
    process = ranks[group.rank]
    return job.worlds[process].allocate(group, num_bytes, TIMEOUT_S, job.gpus[process])


def shutdown(group: ThreadGroup, job: Job) -> bool:
    return job.worlds[group.rank].shutdown(group, TIMEOUT_S)


def release(made: list[Segments]) -> None:
    for segments in made:
        segments.release()
