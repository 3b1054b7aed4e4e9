"""The processes of peers: a descriptor for each, by which engine and Python see that one has ended; and their cores."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_rt import _engine


class Watch:
    """Tells when a process ends; `descriptor`, its open /proc/<pid>/stat, is closed with the last reference."""

    def __init__(self, pid: int) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self.descriptor = os.open(f"/proc/{pid}/stat", flags)
        except (FileNotFoundError, ProcessLookupError):
            self.descriptor = os.open(os.devnull, flags)  # gone already: it is as empty as the file of the dead
        # Not at exit, where daemon threads may still wait: the end of the process closes it.
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    def has_ended(self) -> bool:
        """Whether the process runs no more, also while it still gives back its memory: cuda/host/process.h."""
        return _engine.has_ended(self.descriptor)


def state_letter(pid: int) -> str:
    """What a process does, as the system calls it: R runs, S sleeps, T is stopped, Z and X have ended.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    with Path(f"/proc/{pid}/stat").open("rb") as stat:
        return _engine.process_state(stat.fileno())


def why_closed(pid: int) -> str:
    """Why the system opens no descriptor of this process to us, and what to do about it; to end a sentence with."""
    try:
        owner, own = os.stat(f"/proc/{pid}/status").st_uid, os.geteuid()
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"no process {pid} is here; ranks must be processes of one process-id namespace"
    user = int(status.partition("\nUid:")[2].split()[1])
    if user != own:
        return f"process {pid} is of user {user}, this one of user {own}; ranks must be processes of one user"
    if owner != user:  # the kernel gives root what belongs to such a process
        return (
            f"process {pid} is not dumpable: its program or launcher has asked for that, or it was started from a file "
            "with capabilities or a set-user-id bit; call prctl(PR_SET_DUMPABLE, 1) there before a buffer is made, or "
            "start it from a plain file"
        )
    return (
        f"process {pid} is of the same user, but it has capabilities that this one lacks, or a security module keeps "
        "them apart; start all ranks alike"
    )


_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()


def watch(pid: int) -> Watch:
    """The watch of a process, which all buffers share; the id must be one of this process's own namespace.

    Raises:
        OSError: the system does not tell, or this process may have no more descriptors open.
    """
    found = _watches.get(pid)
    if found is None or found.has_ended():  # then the id may belong to another process by now
        found = _watches[pid] = Watch(pid)
    return found


def num_cores(pids: Iterable[int]) -> int:
    """How many cores the processes may run on, taken together; all that there are where the system does not say.

    Ranks bound to cores of their own have as many as ranks; those of a job held to a few cores, only these.
    """
    try:
        return len(set().union(*(os.sched_getaffinity(pid) for pid in pids)))
    except OSError:
        return os.cpu_count() or 1


UNKNOWN = "unknown "  # how a place begins that the system does not tell


def place() -> dict[str, Any]:
    """Within what a process id has its meaning, a host and its process-id namespace, and this process's id there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        where = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        where = UNKNOWN + secrets.token_hex(16)  # the same as nobody's
    return {"where": where, "pid": os.getpid()}
