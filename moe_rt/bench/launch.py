"""Start the ranks of a job, read rank 0's records, and leave no process running."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_rt.bench import over_nodes
from moe_rt.bench.cases import Case
from moe_rt.bench.rank import Job
from moe_rt.bench.world import barrier_bytes
from moe_rt.heap import ucx
from moe_rt.heap.thread_ranks import ENVIRONMENT as SHARED_GPU
from moe_rt.nodes.cluster import Cluster
from moe_rt.nodes.own_cluster import OwnCluster
from moe_rt.testing.endings import Signals
from moe_rt.testing.programs import ONE_HOST, Program, running, wait

# glibc keeps freed memory with these settings, in huge pages if allowed. By default it returns every large tensor to
# the kernel, and contestants that allocate per call spend most of their time on page faults. torch's caching allocator
# avoids this on GPUs.
RECYCLE = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
MPIRUN_FLAGS = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


class RankFailed(Exception):
    """A rank ended early; its output is on stderr."""


@functools.cache
def find_mpirun() -> str | None:
    """Path of mpirun in this environment or on the system; None if it is missing or mpi4py does not find its
    library."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        return None
    probe = [mpirun, *MPIRUN_FLAGS, "-n", "1", sys.executable, "-c", "import mpi4py.MPI"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run(probe, capture_output=True, timeout=60).returncode == 0:
            return mpirun
    return None


def launch(job: Job, mpirun: str | None, recycle: bool, progress: Callable[[float], None]) -> list[dict[str, Any]]:
    """Run the job and return one record per case, in order.

    Args:
        mpirun: starts the ranks if given; otherwise they are started one by one.
        recycle: run every rank with RECYCLE in its environment.
        progress: called with the fraction of a case completed since the last call.

    Raises:
        InvalidConfig: the case needs emulated nodes, and this process lacks the rights to make them.
        MissingPackage: the same, and a system tool is missing; or UCX is, which every rank would report.
    """
    case = job.cases[0]
    if case.heap == "ucx" and any(name.startswith("moe_rt") for name in job.contestants):
        ucx.library()
    with (
        Signals(),
        _nodes(case) as cluster,
        tempfile.TemporaryDirectory(prefix="moe_rt_bench_", dir=_shared_directory(case)) as directory,
    ):
        (Path(directory) / "job.json").write_text(job.to_json())
        (Path(directory) / "barrier").write_bytes(bytes(barrier_bytes(case.ranks)))
        with running(_programs(case, cluster, directory, mpirun, recycle)) as processes:
            return listen(processes, progress)


@contextlib.contextmanager
def _nodes(case: Case) -> Iterator[Cluster | None]:
    if not case.nodes:
        yield None
        return
    cluster = OwnCluster("bench")
    cluster.up(case.nodes, case.rate or None)
    with cluster:
        yield cluster


def _programs(case: Case, cluster: Cluster | None, directory: str, mpirun: str | None, recycle: bool) -> list[Program]:
    environment = {**ONE_HOST, **(RECYCLE if recycle else {}), **(SHARED_GPU if case.heap == "loopback" else {})}
    command = [sys.executable, "-m", "moe_rt.bench.rank", directory]
    if not case.as_processes:
        return [Program(command, environment)]
    if cluster is not None and mpirun is not None:
        start = [mpirun, *MPIRUN_FLAGS]
        return over_nodes.programs_of_mpi(cluster, case, Path(directory), command, environment, start)
    if cluster is not None:
        return over_nodes.programs(cluster, case, command, environment)
    if mpirun is not None:
        return [Program([mpirun, *MPIRUN_FLAGS, "-n", str(case.ranks), *command], environment)]
    return [Program(command, {**environment, "RANK": str(rank)}) for rank in range(case.ranks)]


def listen(processes: list[subprocess.Popen[str]], progress: Callable[[float], None]) -> list[dict[str, Any]]:
    """Collect the records that the processes print as lines of JSON, until all have ended.

    Raises:
        RankFailed: a process ended with a status other than 0.
    """
    records: list[dict[str, Any]] = []
    with selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, process)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if line:
                    _hear(line, records, progress)
                    continue
                selector.unregister(key.fileobj)
                status = wait(key.data)
                if status != 0:
                    raise RankFailed(f"a rank ended with status {status}; see above")
    return records


def _hear(line: str, records: list[dict[str, Any]], progress: Callable[[float], None]) -> None:
    try:
        message = json.loads(line)
        advanced, record = message.get("progress"), message.get("record")
    except (ValueError, AttributeError):  # a library's output
        print(line, end="", file=sys.stderr)
        return
    if advanced is not None:
        progress(advanced)
    if record is not None:
        records.append(record)


def _shared_directory(case: Case) -> str | None:
    """Directory of the barrier file: in memory if possible, so that the kernel never writes its page to a disk.

    Emulated nodes have separate memory file systems there, and share files elsewhere.
    """
    memory = "/dev/shm"
    return memory if not case.nodes and os.access(memory, os.W_OK) else None
