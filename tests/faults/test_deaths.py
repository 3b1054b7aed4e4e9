"""A process has ended when it stops executing, even if it still frees its memory, and not when only its first thread
ends."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.forked_python import run_python

from moe_rt.diagnostics.collect import _process_state
from moe_rt.group.processes import Watch, watch

GIB = float(os.environ.get("MOE_RT_TEST_GIB", "1"))  # memory of a killed process
KILLS = 5
PATIENCE_S = 600.0

LARGE = f"""
import mmap
memory = mmap.mmap(-1, int({GIB} * 2**30), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(23)  # MADV_POPULATE_WRITE
"""
THREADS = "import threading; [threading.Thread(target=time.sleep, args=(600,)).start() for _ in range(4)]\n"
FIRST_THREAD_ENDS = THREADS + "print(flush=True); import ctypes; ctypes.CDLL(None).pthread_exit(None)\n"
NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z 4 (x', 0, 0, 0)\n"  # PR_SET_NAME


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a Python process that has run the code, and then sleeps until it is killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"import time\n{code}\nprint(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def wait_for_end(watched: Watch) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not watched.has_ended():
        assert time.monotonic() < deadline


def is_readable(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def noticed_before_its_pidfd(code: str) -> bool:
    with process(code) as child:
        watched, pidfd = watch(child.pid), os.pidfd_open(child.pid)
        assert not watched.has_ended()
        child.kill()
        wait_for_end(watched)
        early = not is_readable(pidfd)
        os.close(pidfd)
    assert watched.has_ended(), "nothing is left of the process"
    return early


def test_death_is_noticed_before_the_memory_is_given_back() -> None:
    """A death is noticed before memory is freed in one of a few kills, unless this test is descheduled that long in
    each."""
    assert any(noticed_before_its_pidfd(LARGE) for _ in range(KILLS))
    assert any(noticed_before_its_pidfd(LARGE + THREADS) for _ in range(KILLS))


def test_process_lives_on_without_its_first_thread() -> None:
    with process(FIRST_THREAD_ENDS) as child:
        watched, deadline = watch(child.pid), time.monotonic() + PATIENCE_S
        while _process_state(child.pid) != "dead":  # the state of a process whose first thread is dead
            assert time.monotonic() < deadline
        assert not watched.has_ended()
        with no_descriptor_left():  # its other threads cannot be listed
            assert not watched.has_ended()
        child.kill()
        wait_for_end(watched)


def test_name_of_a_process_is_not_believed() -> None:
    with process(NAMED) as child:
        assert b") Z 4 (x" in Path(f"/proc/{child.pid}/stat").read_bytes()
        assert _process_state(child.pid) == "running"
        assert not watch(child.pid).has_ended()


def test_watch_is_shared_while_its_process_lives() -> None:
    """A watch is shared while its process lives; afterwards another process may get the id."""
    with process("") as child:
        first = watch(child.pid)
        assert watch(child.pid) is first
        child.kill()
        wait_for_end(first)
        assert watch(child.pid) is not first


def test_deaths_are_measured() -> None:
    done = run_python("-m", "moe_rt.lab.chaos.deaths", "--gib", "0", "--gib", "0.25", "--kills", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    deaths = json.loads(done.stdout.splitlines()[-1])
    assert [(death["gib"], death["raised"]) for death in deaths] == [(gib, "PeerDead") for gib in (0, 0, 0.25, 0.25)]
    assert "| 0.25 | 2 | " in done.stdout
