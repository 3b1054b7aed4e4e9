"""Start the ranks of a job, on this host or on emulated nodes, read rank 0's records, and leave no process running."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_rt.group.thread_ranks import ENVIRONMENT as SHARED_GPU
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.rank import Job
from moe_rt.lab.bench.world import barrier_bytes
from moe_rt.lab.cluster.cluster import INTERFACE, Cluster
from moe_rt.lab.cluster.own_cluster import OwnCluster
from moe_rt.lab.cluster.run import in_node
from moe_rt.lab.testing.endings import Signals
from moe_rt.lab.testing.programs import ONE_HOST, Program, running, wait
from moe_rt.memory.heaps import HEAPS

# Interface for all traffic. UCX and Open MPI would also try the loopback interface, which reaches no other node.
_ON_NODES = {"GLOO_SOCKET_IFNAME": INTERFACE, "UCX_NET_DEVICES": INTERFACE}
_MPIRUN_FLAGS_ON_NODES = (
    *("--leave-session-attached", "--prtemca", "plm_ssh_no_tree_spawn", "1"),
    *("--prtemca", "prte_if_include", INTERFACE, "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
    *("--mca", "btl_tcp_if_include", INTERFACE),
)
# Replaces ssh: the shell that waits in that node receives the command line and splits it, as with ssh.
_AGENT = '#!/bin/sh\nhost=$1; shift; echo "$*" > "$(dirname "$0")/$host/command"\n'
_AWAIT = 'read -r command < "$0"; eval "$command"'


def programs_on_nodes(
    cluster: Cluster, case: Case, command: Sequence[str], environment: Mapping[str, str]
) -> list[Program]:
    """One program per rank, with its rank in RANK."""
    environment = {**environment, **_ON_NODES}
    return [
        Program(in_node(cluster, node, command), {**environment, "RANK": str(rank)})
        for rank, node in enumerate(case.topology.nodes)
    ]


def programs_of_mpi(
    cluster: Cluster,
    case: Case,
    directory: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    mpirun: Sequence[str],
) -> list[Program]:
    """mpirun in the first node, and in each other node a shell that becomes its daemon."""
    agent = directory / "agent"
    agent.write_text(_AGENT)
    agent.chmod(0o700)
    each = case.ranks // case.nodes
    hosts = ",".join(f"node{node}:{each}" for node in range(case.nodes))
    started = [*mpirun, *_MPIRUN_FLAGS_ON_NODES, "--prtemca", "plm_ssh_agent", str(agent), "--host", hosts]
    started += ["--map-by", f"ppr:{each}:node", "-n", str(case.ranks), *command]
    commands = [started]
    for node in range(1, case.nodes):
        commands.append(["sh", "-c", _AWAIT, str(directory / f"node{node}" / "command")])
    made = []
    for node, words in enumerate(commands):
        own = directory / f"node{node}"  # nodes share /tmp and process ids, and Open MPI names its files by them
        own.mkdir()
        os.mkfifo(own / "command")
        made.append(Program(in_node(cluster, node, words), {**environment, **_ON_NODES, "TMPDIR": str(own)}))
    return made


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
    own = Path(sys.executable).with_name("mpirun")
    mpirun = str(own) if own.exists() else shutil.which("mpirun")
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
    heap = HEAPS[case.heap]
    if heap.over_hosts and any(name.startswith("moe_rt") for name in job.contestants):
        heap.module.library()
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
    environment = {
        **ONE_HOST,
        **(RECYCLE if recycle else {}),
        **(SHARED_GPU if case.on_gpu and not case.as_processes else {}),
    }
    command = [sys.executable, "-m", "moe_rt.lab.bench.rank", directory]
    if not case.as_processes:
        return [Program(command, environment)]
    if cluster is not None and mpirun is not None:
        start = [mpirun, *MPIRUN_FLAGS]
        return programs_of_mpi(cluster, case, Path(directory), command, environment, start)
    if cluster is not None:
        return programs_on_nodes(cluster, case, command, environment)
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
                    _take_line(line, records, progress)
                    continue
                selector.unregister(key.fileobj)
                status = wait(key.data)
                if status != 0:
                    raise RankFailed(f"a rank ended with status {status}; see above")
    return records


def _take_line(line: str, records: list[dict[str, Any]], progress: Callable[[float], None]) -> None:
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
