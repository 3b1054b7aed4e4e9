"""The order in which the NVSHMEM heap waits for the GPU and for puts, and frees memory, in each process."""

from __future__ import annotations

from typing import Any

import pytest
from heap import fake_nvshmem
from heap.fake_nvshmem import PAGE, HostGpu
from heap.nvshmem_job import Job, release


class NotingGpu(HostGpu):
    """Notes each wait among the calls of its process."""

    def __init__(self, job: Job, process: int) -> None:
        super().__init__()
        self.job, self.process = job, process

    def synchronize(self) -> None:
        self.job.cluster.calls.append((self.process, "wait", None))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job, fill = Job(2), fake_nvshmem.Buffer.fill

    def noting(buffer: Any, value: int, *, stream: object) -> None:
        (core,) = (core for core in job.cores if buffer in core.buffers)
        job.cluster.calls.append((core.process, "fill", None))
        fill(buffer, value, stream=stream)

    monkeypatch.setattr(fake_nvshmem.Buffer, "fill", noting)
    job.gpus[:] = [NotingGpu(job, process) for process in range(2)]
    return job


def calls(job: Job, since: int) -> list[str]:
    """Return the calls of one process after the first `since` of both; those of the other are equal."""
    own = [[name for process, name, _ in job.cluster.calls[since:] if process == rank] for rank in range(2)]
    leader = {"get_unique_id"}  # rank 0 makes it
    assert [name for name in own[0] if name not in leader] == own[1]
    return own[1]


def test_work_is_done_before_puts_are_waited_for_and_zeros_are_there_before_peers_write(job: Job) -> None:
    made = job.allocate(PAGE)
    assert calls(job, 0) == ["load", "init", "wait", "buffer", "get_peer_buffer", "fill", "wait"]
    since = len(job.cluster.calls)
    release(made)
    assert calls(job, since) == [], "a release waits for nothing"
    job.allocate(PAGE)
    assert calls(job, since) == ["wait", "quiet", "wait", "fill", "wait"]


def test_a_shutdown_waits_for_work_before_anything_is_freed(job: Job) -> None:
    release([*job.allocate(PAGE), *job.allocate(PAGE)])
    since = len(job.cluster.calls)
    assert job.shutdown() == [True, True]
    assert calls(job, since) == ["wait", "free", "free", "finalize"]
