"""Reports made by another process, on ranks that wait, are stopped, or are dead."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from diagnostics import cases_diagnostics as cases
from support.forked_python import run_python
from support.ranks import ProcessRanks

from moe_rt.diagnostics import attach
from moe_rt.errors import InvalidConfig, MoeRtError

FAULTY_RANK, SIZE = 1, 3
LATE = "rank 1 has not announced dispatch #2, for which ranks 0 and 2 wait; it "
INFO = ["-m", "moe_rt", "info", "--attach"]
# Change the user id after the imports: another user may not be able to read the checkout.
AS_NOBODY = """
import os, sys
from moe_rt.info import info
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
info(["--attach", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(SIZE)
    yield ranks
    ranks.close()


@contextmanager
def late_rank(ranks: ProcessRanks, folder: Path) -> Iterator[list[int]]:
    """Yield the ranks' pids; all other ranks wait for the faulty one while the body runs."""
    pids, come = ranks.pids, folder / "come"
    work = threading.Thread(target=ranks.outcomes, args=(cases.late_until, FAULTY_RANK, str(come)))
    work.start()
    try:
        wait_until_stuck(pids[0])
        yield pids
    finally:
        come.touch()
        work.join()


def wait_until_stuck(pid: int) -> None:
    deadline = time.monotonic() + cases.WAIT_S
    while time.monotonic() < deadline:
        with suppress(MoeRtError):  # the buffer may not exist yet
            for report in attach(pid):
                if report.conclusion.startswith(f"{LATE}last finished combine #1 "):
                    return
        time.sleep(0.05)
    raise AssertionError("the others do not wait")


def wait_until_stopped(pid: int) -> None:
    """Wait until the process is stopped: a stop signal takes effect when the kernel next runs the process."""
    deadline = time.monotonic() + cases.WAIT_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "the rank does not stop"
        time.sleep(0.01)


def run_info(*args: str) -> subprocess.CompletedProcess[str]:
    return run_python(*INFO, *args)


def test_attach_finds_ranks_that_a_process_has_started(ranks: ProcessRanks, tmp_path: Path) -> None:
    """`attach` finds the ranks from the pid of an ancestor. A user of a server knows only its first process."""
    starter = int(Path(f"/proc/{ranks.pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    with late_rank(ranks, tmp_path) as pids:
        for pid in (starter, int(Path(f"/proc/{starter}/stat").read_text().rpartition(")")[2].split()[1])):
            found = [[rank.pid for rank in report.ranks] for report in attach(pid)]
            assert found.count(pids) == 1


def test_attach_says_who_is_late(ranks: ProcessRanks, tmp_path: Path) -> None:
    with late_rank(ranks, tmp_path) as pids:
        for pid in pids:
            (report,) = attach(pid)
            assert report.stragglers == [FAULTY_RANK]
            assert [(r.pid, r.process, r.problem) for r in report.ranks] == [(p, "running", "") for p in pids]
            assert report.conclusion.startswith(f"{LATE}last finished combine #1 ")
        shown = run_info(str(pids[0]))
        written = run_info(str(pids[2]), "--json")
    assert LATE in shown.stdout, shown
    assert written.returncode == 0, written
    document = json.loads(written.stdout)
    assert [r["waits_for"] for r in document[0]["ranks"]] == [[1], [], [1]]


def test_attach_to_a_stopped_rank(ranks: ProcessRanks, tmp_path: Path) -> None:
    with late_rank(ranks, tmp_path) as pids:
        os.kill(pids[FAULTY_RANK], signal.SIGSTOP)
        try:
            wait_until_stopped(pids[FAULTY_RANK])
            (report,) = attach(pids[FAULTY_RANK])
        finally:
            os.kill(pids[FAULTY_RANK], signal.SIGCONT)
    assert report.ranks[FAULTY_RANK].process == "stopped"
    assert report.conclusion.startswith(f"{LATE}is stopped (process {pids[FAULTY_RANK]}), last finished combine #1 ")


def test_attach_to_the_survivor_of_a_dead_rank(tmp_path: Path) -> None:
    ranks = ProcessRanks(SIZE)
    with late_rank(ranks, tmp_path) as pids:
        os.kill(pids[2], signal.SIGSTOP)  # the rank must not notice it first
        ranks.kill(FAULTY_RANK)
        (report,) = attach(pids[2])
        os.kill(pids[2], signal.SIGCONT)
    ranks.close()
    dead = report.ranks[FAULTY_RANK]
    assert (dead.process, dead.problem) == ("dead", "")
    assert [op.op for op in dead.last_ops] == ["dispatch", "combine"]
    assert report.stragglers == [FAULTY_RANK]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_other_users_are_refused(ranks: ProcessRanks, tmp_path: Path) -> None:
    with late_rank(ranks, tmp_path) as pids:
        seen = run_python("-c", AS_NOBODY, str(pids[0]))
    assert seen.returncode == 1
    assert "SegmentPermission: process" in seen.stderr, seen


@pytest.mark.parametrize(
    ("pid", "got"), [(os.getpid(), "without a buffer"), (2**30, "which is no process")], ids=["self", "nobody"]
)
def test_processes_without_a_group_are_refused(pid: int, got: str) -> None:
    with pytest.raises(InvalidConfig, match=got):
        attach(pid)


@pytest.mark.parametrize("sealed", [False, True])
def test_files_that_could_shrink_are_left_alone(sealed: bool) -> None:
    """A file that could shrink is not mapped: a reader of a truncated mapping dies of SIGBUS."""
    file = os.memfd_create("moe_rt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(file, cases.healthy_segment())
        if sealed:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            assert attach(os.getpid())[0].ranks[0].problem == "not mapped here", "threads have no file"
        else:
            with pytest.raises(InvalidConfig, match="without a buffer"):
                attach(os.getpid())
    finally:
        os.close(file)


def test_info_errors() -> None:
    """`moe-rt info` prints the error and nothing else."""
    seen = run_info(str(2**30))
    assert (seen.returncode, seen.stdout) == (1, "")
    assert "InvalidConfig: pid: got 1073741824, which is no process here" in seen.stderr
