"""Starts the ranks of a job, listens to rank 0, and leaves none of them behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from moe_rt.bench.rank import Job
from moe_rt.bench.world import barrier_bytes
from moe_rt.testing.ranks import ENVIRONMENT as SHARED_GPU

# glibc then keeps freed memory, in huge pages where it may. By default it returns every large tensor to the kernel, and
# all that allocate per call spend most of their time on page faults; on a GPU torch's caching allocator sees to this.
RECYCLE = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
MPIRUN_FLAGS = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


class RankFailed(Exception):
    """A rank ended early; what it said is on stderr."""


@functools.cache
def find_mpirun() -> str | None:
    """mpirun of this environment or of the system, if it is there and mpi4py finds its library; None otherwise."""
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
    """Runs the job and returns one record per case, in order.

    Args:
        mpirun: starts the ranks, where given; otherwise they are started one by one.
        recycle: run every rank with RECYCLE in its environment.
        progress: called with the part of a case that has been done since the last call.
    """
    case = job.cases[0]
    with (
        _Sigterm() as sigterm,
        tempfile.TemporaryDirectory(prefix="moe_rt_bench_", dir=_shared_directory()) as directory,
    ):
        (Path(directory) / "job.json").write_text(job.to_json())
        (Path(directory) / "barrier").write_bytes(bytes(barrier_bytes(case.ranks)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(RECYCLE if recycle else {})}
        environment |= SHARED_GPU if case.heap == "loopback" else {}
        program = [sys.executable, "-m", "moe_rt.bench.rank", directory]
        if not case.as_processes:
            starts = [(program, environment)]
        elif mpirun is not None:
            starts = [([mpirun, *MPIRUN_FLAGS, "-n", str(case.ranks), *program], environment)]
        else:
            starts = [(program, {**environment, "RANK": str(rank)}) for rank in range(case.ranks)]
        processes: list[subprocess.Popen[str]] = []
        with _ended(processes):
            with sigterm.held():
                processes.extend(_start(*start) for start in starts)
            return _listen(processes, progress)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


def _listen(processes: list[subprocess.Popen[str]], progress: Callable[[float], None]) -> list[dict[str, Any]]:
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
                if key.data.wait() != 0:
                    raise RankFailed(f"a rank ended with status {key.data.returncode}; see above")
    return records


def _hear(line: str, records: list[dict[str, Any]], progress: Callable[[float], None]) -> None:
    try:
        message = json.loads(line)
        advanced, record = message.get("progress"), message.get("record")
    except (ValueError, AttributeError):  # something a library prints
        print(line, end="", file=sys.stderr)
        return
    if advanced is not None:
        progress(advanced)
    if record is not None:
        records.append(record)


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """On the way out no process is left: those of a failed run would wait for the one that failed."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()  # mpirun passes it on to its ranks
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Sigterm:
    """SIGTERM, as `timeout` sends it, would end Python at once, and leave ranks running and files in memory.

    It raises SystemExit instead; while `held`, only afterwards: a process that is being started could not be ended yet.
    """

    def __enter__(self) -> _Sigterm:
        self._holding, self._arrived = False, False
        self._before = signal.signal(signal.SIGTERM, self._arrive)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._arrived:
            self._leave()

    def _arrive(self, number: int, frame: object) -> None:
        self._arrived = True
        if not self._holding:
            self._leave()

    def _leave(self) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)


def _shared_directory() -> str | None:
    """Where the barrier lives: in memory if possible, so that the kernel never writes its page to a disk."""
    memory = "/dev/shm"
    return memory if os.access(memory, os.W_OK) else None
