"""The processes of peers: a descriptor for each, by which engine and Python see that one has ended; and their cores."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable


def watch(pid: int) -> int:
    """A descriptor that tells when the process ends: a pidfd or, where the system denies those, /proc/<pid>/stat.

    -1 where there is neither: then only time tells.
    """
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        return os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def has_ended(descriptor: int) -> bool:
    """Whether the process that `watch` gave this for is gone; False for -1. As HostIdle::is_dead in waiting.h.

    A pidfd is readable once the process has ended, and then, like the stat file of a process that is gone, gives
    nothing; the stat file of one that is left to be collected says so.
    """
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not any(events & select.POLLIN for _, events in poll.poll(0)):
        return False
    try:
        stat = os.pread(descriptor, 512, 0)
    except OSError:
        return True
    return not stat or state_letter(stat) in ("Z", "X")


def state_letter(stat: bytes) -> str:
    """A process's state in its /proc/<pid>/stat: what follows its name, which may hold blanks and parentheses."""
    fields = stat.rpartition(b")")[2].split()
    return fields[0].decode() if fields else ""


def num_cores(pids: Iterable[int]) -> int:
    """How many cores the processes may run on, taken together; all that there are where the system does not say.

    Ranks bound to cores of their own have as many as ranks; those of a job held to a few cores, only these.
    """
    try:
        return len(set().union(*(os.sched_getaffinity(pid) for pid in pids)))
    except OSError:
        return os.cpu_count() or 1
