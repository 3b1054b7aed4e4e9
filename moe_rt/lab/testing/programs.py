"""Starts programs that run as ranks or for one, sets their environment, and ends all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rt.lab.testing.endings import Signals, end_with, ended_within

# Environment of ranks on one machine: a core each, and gloo without a name lookup.
ONE_HOST = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
END_S = 10.0
STARTER = "MOE_RT_STARTED_BY"


@dataclass(frozen=True)
class Program:
    """A command and its additions to the environment.

    Attributes:
        output: destination of stdout, as for subprocess.Popen.
        errors: destination of stderr; None leaves the caller's.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    output: Any = subprocess.PIPE
    errors: Any = None


@contextlib.contextmanager
def running(programs: Sequence[Program]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the programs and yield their processes. On exit, for any reason, end all of them and their children."""
    processes: list[subprocess.Popen[str]] = []
    with Signals() as signals:
        try:
            with signals.held():
                processes.extend(start(program) for program in programs)
            yield processes
        finally:
            with signals.held():
                _end(processes)


def start(program: Program) -> subprocess.Popen[str]:
    """Start a program in a new session, so that its children can be ended with it. Ctrl-C reaches only the caller."""
    environment = {**os.environ, **program.environment, STARTER: str(os.getpid())}
    return subprocess.Popen(
        program.command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=program.output,
        stderr=program.errors,
        text=True,
        start_new_session=True,
    )


def wait(process: subprocess.Popen[str], seconds: float | None = None) -> int | None:
    """Return the exit status of a program that `running` started, negative for a signal; None if it still runs.

    Popen.wait takes a lock. If a signal handler raises right after that, the lock is never released, and every later
    wait for the process hangs, as Ctrl-C would sometimes cause.
    """
    pidfd = os.pidfd_open(process.pid)
    try:
        if not ended_within(pidfd, seconds):
            return None
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # `running` collects it
    finally:
        os.close(pidfd)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def end_with_starter() -> None:
    """Make this program end with the caller of `running`. A program of this project does this first."""
    if STARTER in os.environ:
        end_with(int(os.environ[STARTER]))


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.terminate()  # mpirun passes it on to its ranks
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
