"""Programs that run as ranks or for one: how they are started, in which environment, and that none stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rt.testing.endings import Signals, end_with, ended_within

# Ranks of one machine: a core each, and gloo without asking for a name.
ONE_HOST = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
END_S = 10.0
STARTER = "MOE_RT_STARTED_BY"


@dataclass(frozen=True)
class Program:
    """A command with what is added to the environment.

    Attributes:
        output: where stdout goes, as of subprocess.Popen.
        errors: where stderr goes; None leaves it where that of the caller is.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    output: Any = subprocess.PIPE
    errors: Any = None


@contextlib.contextmanager
def running(programs: Sequence[Program]) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of the programs. On the way out, whatever the reason, none is left, nor a child of one."""
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
    """In a session of its own, so that all its children can be ended with it; Ctrl-C reaches the caller alone."""
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
    """The exit status of a program that `running` started, negative for a signal; None if it has none in that time.

    Popen.wait takes a lock. Where a signal raises right after that, nobody gives the lock back, and every later wait
    for the process hangs: so Ctrl-C would, at times.
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
    """What a program of ours does first: from then on it does not outlive who has called `running`."""
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
