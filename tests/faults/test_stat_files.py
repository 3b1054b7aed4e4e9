"""A process counts as ended by the contents of its stat file: state, flags and number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rt import _engine

NO_PROCESS = 2**22 + 1  # above the largest process id of a 64-bit system
EXITING, POSTCOREDUMP, DUMPCORE = 0x4, 0x8, 0x200


def stat(state: str = "S", flags: int = 0, threads: int = 1, pid: int = NO_PROCESS, name: str = "python") -> str:
    """Return a stat file as proc_pid_stat(5) describes it; the other numbers are 1."""
    return f"{pid} ({name}) {state} 1 1 1 1 1 {flags} 1 1 1 1 1 1 1 1 1 1 {threads} 1 1 1\n"


def looked_at(path: Path, text: str) -> tuple[bool, str]:
    path.write_text(text)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _engine.has_ended(descriptor), _engine.process_state(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("state", "ends"), [(s, s in "ZX") for s in "RSDTtIZX"])
def test_states(tmp_path: Path, state: str, ends: bool) -> None:
    assert looked_at(tmp_path / "stat", stat(state)) == (ends, state)


@pytest.mark.parametrize("bit", range(32))
def test_flags(tmp_path: Path, bit: int) -> None:
    ends = 1 << bit in (EXITING, POSTCOREDUMP, DUMPCORE)
    assert looked_at(tmp_path / "stat", stat(flags=1 << bit)) == (ends, "S")
    assert looked_at(tmp_path / "stat", stat(flags=~(EXITING | POSTCOREDUMP | DUMPCORE) & 0xFFFFFFFF))[0] is False


@pytest.mark.parametrize("name", ["a b", ") Z (", "(x)", "))", ""])
def test_names_may_hold_anything(tmp_path: Path, name: str) -> None:
    assert looked_at(tmp_path / "stat", stat("R", name=name)) == (False, "R")
    assert looked_at(tmp_path / "stat", stat("Z", name=name)) == (True, "Z")


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_a_first_thread_that_has_ended_may_have_left_others(tmp_path: Path, threads: int) -> None:
    """Other threads are looked for if there are any; those of this process run, and none are found of no process."""
    for pid in (os.getpid(), NO_PROCESS):
        assert looked_at(tmp_path / "stat", stat("Z", threads=threads, pid=pid)) == (threads <= 1, "Z")
        assert looked_at(tmp_path / "stat", stat("S", threads=threads, pid=pid)) == (False, "S")


def test_all_threads_of_a_zombie_have_ended(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert looked_at(tmp_path / "stat", stat("Z", threads=2, pid=child.pid)) == (True, "Z")
        descriptor = os.open(f"/proc/{child.pid}/stat", os.O_RDONLY)
        assert (_engine.has_ended(descriptor), _engine.process_state(descriptor)) == (True, "Z")
    finally:
        child.wait()
    assert (_engine.has_ended(descriptor), _engine.process_state(descriptor)) == (True, "X")
    os.close(descriptor)


def test_looks_at_threads_keep_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        looked_at(tmp_path / "stat", stat("Z", threads=2, pid=os.getpid()))
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_stat_file(tmp_path: Path) -> None:
    """An empty file is that of a process that has exited; anything unreadable counts as alive."""
    assert looked_at(tmp_path / "stat", "") == (True, "X")
    assert looked_at(tmp_path / "stat", "no process") == (False, "")
    assert looked_at(tmp_path / "stat", "1 (cut") == (False, "")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert (_engine.has_ended(descriptor), _engine.process_state(descriptor)) == (False, "")
    os.close(descriptor)
    assert (_engine.has_ended(-1), _engine.has_ended(descriptor)) == (False, False)
