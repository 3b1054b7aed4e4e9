"""Programs of ranks: their commands and environment on one host, on nodes and under mpirun, and how all of them end."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt.lab.bench import launch
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.rank import Job
from moe_rt.lab.testing import programs
from moe_rt.lab.testing.programs import STARTER, Program, running

USUAL = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
RECYCLE = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1099511627776",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
SHARED_GPU = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
ON_NODES = {"GLOO_SOCKET_IFNAME": "eth0", "UCX_NET_DEVICES": "eth0"}
SIZES: dict[str, Any] = dict(tokens=1, hidden=4, topk=1, experts=8)
MPIRUN = ["/the/mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
NODES: Any = SimpleNamespace(name="nodes")


@pytest.fixture(autouse=True)
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "in_node", lambda cluster, node, words: [f"{cluster.name}{node}:", *words])


def made(case: Case, directory: Path, mpirun: str | None = None, recycle: bool = False) -> list[tuple[Any, Any]]:
    cluster = NODES if case.nodes else None
    found = launch._programs(case, cluster, str(directory), mpirun, recycle)
    assert all(program.output == subprocess.PIPE and program.errors is None for program in found)
    return [(list(program.command), dict(program.environment)) for program in found]


def test_ranks_of_one_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_rt.lab.bench.rank", str(tmp_path)]
    three = Case(ranks=3, **SIZES)
    assert made(three, tmp_path) == [(command, {**USUAL, "RANK": str(rank)}) for rank in range(3)]
    assert made(three, tmp_path, recycle=True)[2] == (command, {**USUAL, **RECYCLE, "RANK": "2"})
    assert made(three, tmp_path, "/the/mpirun", True) == [([*MPIRUN, "-n", "3", *command], {**USUAL, **RECYCLE})]
    threads = Case(ranks=3, heap="threads", **SIZES)
    assert made(threads, tmp_path, "/the/mpirun", True) == [(command, {**USUAL, **RECYCLE})]
    one_gpu = Case(ranks=3, heap="loopback", **SIZES)
    assert made(one_gpu, tmp_path) == [(command, {**USUAL, **SHARED_GPU})]
    gpus = Case(ranks=2, heap="nvshmem", **SIZES)
    assert made(gpus, tmp_path) == [(command, {**USUAL, "RANK": str(rank)}) for rank in range(2)]


def test_ranks_of_nodes(tmp_path: Path) -> None:
    """Ranks are in blocks on the nodes, and use only their network."""
    command = [sys.executable, "-m", "moe_rt.lab.bench.rank", str(tmp_path)]
    case = Case(ranks=4, heap="ucx", nodes=2, **SIZES)
    assert made(case, tmp_path) == [
        ([f"nodes{rank // 2}:", *command], {**USUAL, **ON_NODES, "RANK": str(rank)}) for rank in range(4)
    ]


def test_mpirun_reaches_other_nodes_through_shells_that_wait_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_rt.lab.bench.rank", str(tmp_path)]
    case = Case(ranks=6, heap="ucx", nodes=3, **SIZES)
    first, second, third = made(case, tmp_path, "/the/mpirun")
    agent = tmp_path / "agent"
    flags = ["--leave-session-attached", "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    flags += ["--prtemca", "prte_if_include", "eth0", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    flags += ["--mca", "btl_tcp_if_include", "eth0", "--prtemca", "plm_ssh_agent", str(agent)]
    flags += ["--host", "node0:2,node1:2,node2:2", "--map-by", "ppr:2:node", "-n", "6"]
    places = [tmp_path / f"node{node}" for node in range(3)]
    assert first == (
        ["nodes0:", *MPIRUN, *flags, *command],
        {**USUAL, **ON_NODES, "TMPDIR": str(places[0])},
    )
    shell = 'read -r command < "$0"; eval "$command"'
    for node, started in ((1, second), (2, third)):
        words = [f"nodes{node}:", "sh", "-c", shell, str(places[node] / "command")]
        assert started == (words, {**USUAL, **ON_NODES, "TMPDIR": str(places[node])})
    assert [stat.S_ISFIFO((place / "command").stat().st_mode) for place in places] == [True] * 3
    assert stat.S_IMODE(agent.stat().st_mode) == 0o700


def test_a_shell_in_another_node_gets_the_command_as_ssh_would(tmp_path: Path) -> None:
    """The agent passes on all words but the host, and the shell there splits them."""
    made(Case(ranks=2, heap="ucx", nodes=2, **SIZES), tmp_path, "/the/mpirun")
    there = tmp_path / "node1/command"
    shell = subprocess.Popen(["sh", "-c", launch._AWAIT, there], stdout=subprocess.PIPE, text=True)
    subprocess.run([tmp_path / "agent", "node1", "X=3;", "printf", "'%s|'", "a  b", "$X"], check=True)
    assert shell.communicate()[0] == "a|b|3|"


@pytest.mark.parametrize(("writable", "directory"), [(True, "/dev/shm"), (False, None)])
def test_the_barrier_is_in_memory_if_that_is_shared(
    monkeypatch: pytest.MonkeyPatch, writable: bool, directory: str | None
) -> None:
    monkeypatch.setattr(launch.os, "access", lambda path, mode: writable and (path, mode) == ("/dev/shm", os.W_OK))
    assert launch._shared_directory(Case(**SIZES)) == directory
    assert launch._shared_directory(Case(heap="ucx", nodes=2, **SIZES)) is None


def test_ranks_find_the_job_and_a_line_of_the_barrier_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's directory is removed with it, and the nodes are those of the case."""
    found: list[Any] = []

    @contextmanager
    def started(programs: list[Program]) -> Iterator[list[Any]]:
        directory = Path(programs[0].command[-1])
        assert programs[0].environment.get("MALLOC_MMAP_MAX_") == "0"
        found.append((directory, json.loads((directory / "job.json").read_text())))
        assert (directory / "barrier").read_bytes() == bytes(3 * 64)
        yield []

    class Own:
        def __init__(self, purpose: str) -> None:
            self.name = purpose

        def up(self, *given: Any) -> None:
            found.append(given)

        def __enter__(self) -> Any:
            found.append("in")
            return self

        def __exit__(self, *error: object) -> None:
            found.append("out")

    monkeypatch.setattr(launch, "running", started)
    monkeypatch.setattr(launch, "OwnCluster", Own)
    monkeypatch.setattr(launch, "listen", lambda processes, progress: [{"processes": processes, "says": progress(1)}])
    job = Job([Case(ranks=3, **SIZES)], ["memcpy"], [0], iters=1, warmup=1, seed=0, cold=False)
    assert launch.launch(job, None, True, lambda part: part + 1) == [{"processes": [], "says": 2}]
    ((directory, written),) = found
    assert Job.from_json(json.dumps(written)) == job
    assert directory.name.startswith("moe_rt_bench_")
    assert not directory.exists()
    for rate, given in (("", None), ("1gbit", "1gbit")):
        found.clear()
        on_nodes = Case(ranks=3, heap="ucx", nodes=3, rate=rate, **SIZES)
        launch.launch(Job([on_nodes], ["memcpy"], [0], 1, 1, 0, False), None, True, lambda part: None)
        up, entered, (_, written), left = found
        assert (up, entered, left) == ((3, given), "in", "out")
        assert written["cases"][0]["rate"] == rate


@pytest.mark.parametrize(
    ("own", "other", "probe", "expected"),
    [(True, None, 0, "own"), (True, "/other", 0, "own"), (False, "/other", 0, "/other"), (False, None, 0, None),
     (False, "/other", 1, None), (False, "/other", OSError(), None),
     (False, "/other", subprocess.TimeoutExpired("mpirun", 60), None)],
)  # fmt: skip
def test_mpirun_of_this_environment_comes_first_if_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool, other: str | None, probe: Any, expected: str | None
) -> None:
    def run(words: list[str], **how: Any) -> Any:
        assert words[1:] == [*MPIRUN[1:], "-n", "1", str(tmp_path / "python"), "-c", "import mpi4py.MPI"]
        assert how["capture_output"]
        if isinstance(probe, Exception):
            raise probe
        return SimpleNamespace(returncode=probe)

    if own:
        (tmp_path / "mpirun").touch()
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(launch.shutil, "which", lambda name: other if name == "mpirun" else None)
    monkeypatch.setattr(launch.subprocess, "run", run)
    launch.find_mpirun.cache_clear()
    try:
        assert launch.find_mpirun() == (str(tmp_path / "mpirun") if expected == "own" else expected)
    finally:
        launch.find_mpirun.cache_clear()


def test_a_program_gets_its_environment_and_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RT_OF_THE_CALLER", "kept")
    look = f"echo $A $MOE_RT_OF_THE_CALLER ${STARTER}; cat; echo >&2 error"
    with running([Program(["sh", "-c", look], {"A": "b"}, errors=subprocess.PIPE)]) as (process,):
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        assert process.communicate() == (f"b kept {os.getpid()}\n", "error\n")
    with running([Program(["true"], {}, output=subprocess.DEVNULL)]) as (process,):
        assert process.stdout is None


STUBBORN = 'trap "" TERM; echo ready; while :; do sleep 0.05; done'
ORDERLY = 'trap "exit 7" TERM; sleep 10000 & echo $!; wait'


def test_programs_and_their_children_have_ended_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends at SIGTERM has its own status; one that does not is killed, and so are children of both."""
    monkeypatch.setattr(programs, "END_S", 0.05)
    with running([Program(["sh", "-c", STUBBORN], {})]) as stubborn:
        assert stubborn[0].stdout.readline() == "ready\n"
    monkeypatch.setattr(programs, "END_S", 600.0)
    with running([Program(["sh", "-c", ORDERLY], {}), Program(["sleep", "10000"], {})]) as others:
        child = int(others[0].stdout.readline())
        pidfd = os.pidfd_open(child)
    assert [process.returncode for process in (*stubborn, *others)] == [-signal.SIGKILL, 7, -signal.SIGTERM]
    assert all(process.stdout.closed for process in (*stubborn, *others))
    assert programs.ended_within(pidfd, 600.0)
    os.close(pidfd)


def test_a_program_that_cannot_start_ends_those_before_it() -> None:
    started: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        begin = programs.start
        patch.setattr(programs, "start", lambda program: started.append(begin(program)) or started[-1])
        with pytest.raises(FileNotFoundError), running([Program(["sleep", "9999"], {}), Program(["/no/program"], {})]):
            pytest.fail("it started")
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_a_status_or_none_while_a_program_runs() -> None:
    """It can be asked for again, as it stays uncollected."""
    with running([Program(["sh", "-c", "read line; exit 3"], {}), Program(["sleep", "9999"], {})]) as processes:
        assert [programs.wait(processes[0]) for _ in range(2)] == [3, 3], "it reads nothing"
        assert programs.wait(processes[1], 0.0) is None
        processes[1].kill()
        assert programs.wait(processes[1], 600.0) == -signal.SIGKILL
