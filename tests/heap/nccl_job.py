"""Processes with NCCL each, for tests: a World per process on the stand-in, and ranks that allocate together."""

from __future__ import annotations

from typing import Any

from heap import nvshmem_job
from heap.fake_nccl import Cluster
from heap.fake_nvshmem import HostGpu
from heap.nvshmem_job import TIMEOUT_S, release
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.memory import gin

__all__ = ["TIMEOUT_S", "Job", "release"]


class Job(nvshmem_job.Job):
    """A cluster's processes, each with its own World."""

    cluster: Any
    cores: Any
    worlds: Any

    def __init__(self, size: int) -> None:
        self.cluster = Cluster(size)
        self.cores = self.cluster.cores
        self.worlds = [gin.World(core.load) for core in self.cores]
        self.gpus = [HostGpu() for _ in range(size)]

    def shutdown(self) -> list[Any]:
        outcomes = ThreadRanks(len(self.cores)).outcomes(shutdown, self)
        assert not self.cluster.violations
        return outcomes


def shutdown(group: ThreadGroup, job: Job) -> None:
    job.worlds[group.rank].shutdown(group, TIMEOUT_S, job.gpus[group.rank])
