"""A program that starts ranks or steps as processes leaves none running after SIGTERM, SIGHUP, Ctrl-C or SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked_python import run_python

from moe_rt.group.processes import state_letter
from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.process_ranks import ProcessRanks
from moe_rt.lab.testing.programs import STARTER, Program, running, wait

ROOT = Path(__file__).resolve().parents[2]

PATIENCE_S = 600.0
KILL = signal.SIGKILL
SLEEP = "from moe_rt.lab.testing.programs import end_with_starter; end_with_starter(); import time; time.sleep(600)"
STEP = [sys.executable, "-c", SLEEP]
# name -> a program that starts processes, an argument of theirs, and their final count.
STARTERS = {
    "chaos": (["-m", "moe_rt", "chaos", "--action", "stop", "--timeout", "60", "--rounds", "9"], "chaos", 4),
    "step": (["-c", f"from moe_rt.lab.check.child import run_command; run_command({STEP}, 600, {{}})"], SLEEP, 1),
    "network": (
        ["-c", "from moe_rt.lab.check import network; network.run_processes('cpu', 2, 'shm', 600)"],
        "moe_rt.lab.check.network",
        2,
    ),
    "bench": (
        ["-m", "moe_rt", "bench", "--contestants", "moe_rt", "--iters", str(10**6)],
        "moe_rt.lab.bench.rank",
        2,
    ),
}


def is_alive(pid: int) -> bool:
    try:
        return state_letter(pid) not in ("Z", "X", "")
    except (FileNotFoundError, ProcessLookupError):
        return False


def programs_of(pid: int, argument: str) -> list[int]:
    """Return the program's children with this argument; a library may briefly start other programs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if argument in arguments_of(child)]


def arguments_of(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("starter", "number"),
    [
        pytest.param(starter, number, marks=() if starter == "bench" or number == KILL else pytest.mark.sweep)
        for starter in STARTERS
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, KILL)
    ],
)
def test_nothing_outlives_who_started_it(starter: str, number: signal.Signals) -> None:
    """At SIGKILL the kernel ends the children, or they exit themselves if they had not yet asked the kernel to."""
    arguments, argument, count = STARTERS[starter]
    process = subprocess.Popen(
        ["env", "--default-signal=HUP", sys.executable, *arguments],  # the caller may ignore SIGHUP
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children: list[int] = []
    folders: set[str] = set()
    try:
        wait_until(lambda: len(programs_of(process.pid, argument)) >= count)
        children = programs_of(process.pid, argument)
        folders = {word for child in children for word in arguments_of(str(child)) if word.startswith("/dev/shm/")}
        process.send_signal(number)
        status = process.wait(PATIENCE_S)
        assert status in (128 + number, -number, 1)  # click exits with 1 at Ctrl-C
        wait_until(lambda: not any(map(is_alive, children)))
    finally:
        process.kill()
        process.wait()
        left = [folder for folder in folders if Path(folder).exists()]
        for folder in left:
            shutil.rmtree(folder)
    assert len(children) == count
    assert not left or number == KILL, "only a killed program leaves its files"


def sleeps(end: Channel) -> None:
    end.send(str(os.getpid()).encode())
    time.sleep(PATIENCE_S)


def test_a_process_of_the_fork_server_ends_with_its_starter() -> None:
    """The server forked it, and would go on for as long as it lives."""
    program = (
        "from faults.test_endings import Channel, sleeps\n"
        "from moe_rt.lab.testing.forking import fork_in_server\n"
        "ours, theirs = Channel.pair()\n"
        "forked = fork_in_server(sleeps, (), theirs)\n"
        "print(ours.receive(600.0).decode(), flush=True)\n"
        "input()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        assert is_alive(child)
        starter.kill()
    try:
        wait_until(lambda: not is_alive(child))
    finally:
        if is_alive(child):
            os.kill(child, KILL)


PROGRAMS = [path for path in ROOT.glob("moe_rt/**/*.py") if re.search(r"import .*end_with_starter", path.read_text())]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_ends_if_its_starter_has_ended(path: Path) -> None:
    """The kernel does not end it, as its starter ended before it asked the kernel to. It is given no orders."""
    with subprocess.Popen(["true"]) as ended:
        pass
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    done = run_python("-m", name, json.dumps({"job": 1}), env={**os.environ, STARTER: str(ended.pid)})
    assert done.returncode == -KILL, done.stderr


@pytest.mark.parametrize(
    ("does", "status"), [("exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("time.sleep(600)", None)]
)
def test_an_interrupted_wait_can_be_followed_by_another(does: str, status: int | None) -> None:
    """A later wait succeeds although a signal that raises in Popen.wait may leave its lock taken."""
    program = Program([sys.executable, "-c", f"import os, time; {does}"], {})
    with running([program]) as (process,), process._waitpid_lock:  # type: ignore[attr-defined]
        assert wait(process, 0.05 if status is None else PATIENCE_S) == status
    assert process.returncode == (-signal.SIGTERM if status is None else status)


def echo(channel: Channel, prefix: str) -> None:
    channel.send(prefix.encode() + channel.receive())


def test_messages_and_ends_of_ranks() -> None:
    with ProcessRanks(in_server=True) as pool:
        for rank in range(3):
            pool.start(rank, echo, f"rank {rank} got ")
        pids = [pool.pid(rank) for rank in range(3)]
        large = b"x" * (3 << 20)
        pool.send(0, large)
        assert pool.receive(0, PATIENCE_S) == b"rank 0 got " + large
        with pytest.raises(EOFError):
            pool.receive(0, PATIENCE_S)
        assert pool.await_end(0, PATIENCE_S)
        with pytest.raises(TimeoutError):
            pool.receive(1, 0.01)
        pool.send_signal(1, signal.SIGSTOP)
        pool.kill(1)
        assert 1 not in pool
        pool.start(1, echo, "again ")
        pool.send(1, b"x")
        assert pool.receive(1, PATIENCE_S) == b"again x"
        pids.append(pool.pid(1))
    wait_until(lambda: not any(map(is_alive, pids)))


def until_hung_up(channel: Channel) -> None:
    with contextlib.suppress(EOFError):
        channel.receive()


def test_hanging_up_reaches_a_rank_although_later_ones_hold_copies() -> None:
    with ProcessRanks() as earlier, ProcessRanks() as later:
        earlier.start(0, until_hung_up)
        later.start(0, until_hung_up)
        earlier.hang_up(0)
        assert earlier.await_end(0, PATIENCE_S)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal(ignored: bool) -> None:
    """Ranks end with the terminal, unless the program was started with nohup: then they and the program continue."""
    how = "--ignore-signal=HUP" if ignored else "--default-signal=HUP"
    words = ["env", how, sys.executable, Path(__file__).with_name("hangup_job.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == ((0, "goes on\n") if ignored else (128 + signal.SIGHUP, ""))
