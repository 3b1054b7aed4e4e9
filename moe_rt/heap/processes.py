"""The processes of peers: a descriptor for each, by which engine and Python see that one has ended; and their cores."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable

from moe_rt import _engine


class Watch:
    """Tells when a process ends; `descriptor`, its open /proc/<pid>/stat, is closed with the last reference."""

    def __init__(self, pid: int) -> None:
        self.descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        # Not at exit, where daemon threads may still wait: the end of the process closes it.
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    def has_ended(self) -> bool:
        """Whether the process runs no more, also while it still gives back its memory: cuda/host/process.h."""
        return _engine.has_ended(self.descriptor)


_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()


def watch(pid: int) -> Watch:
    """The watch of a process, which all buffers share.

    Raises:
        OSError: there is no such process, or this one may have no more descriptors open.
    """
    found = _watches.get(pid)
    if found is None or found.has_ended():  # then the id may belong to another process by now
        found = _watches[pid] = Watch(pid)
    return found


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
