"""Processes of peers: a descriptor of each, by which engine and Python detect its end, and the cores they may use."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_rt import _engine


class Watch:
    """Detects the end of a process. `descriptor`, its open /proc/<pid>/stat, is closed with the last reference."""

    def __init__(self, pid: int) -> None:
        try:
            self.descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        except (FileNotFoundError, ProcessLookupError):
            self.descriptor = os.open(os.devnull, os.O_RDONLY)  # already exited: empty like a dead process's file
        # Do not close it at exit, where daemon threads may still wait: the end of the process does.
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    def has_ended(self) -> bool:
        """True if the process no longer runs, even if it is still returning its memory (cuda/cpu/process.h)."""
        return _engine.has_ended(self.descriptor)


def state_letter(pid: int) -> str:
    """Return the system's letter for the state of a process: R runs, S sleeps, T is stopped, Z and X have ended.

    Raises:
        FileNotFoundError, ProcessLookupError: the process does not exist.
    """
    with Path(f"/proc/{pid}/stat").open("rb") as stat:
        return _engine.process_state(stat.fileno())


def why_closed(pid: int) -> str:
    """Say why the system denies a descriptor of this process, and what to do about it. Used to end a sentence."""
    try:
        owner, own = os.stat(f"/proc/{pid}/status").st_uid, os.geteuid()
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"no process {pid} is here; ranks must be processes of one process-id namespace"
    user = int(status.partition("\nUid:")[2].split()[1])
    if user != own:
        return f"process {pid} is of user {user}, this one of user {own}; ranks must be processes of one user"
    if owner != user:  # the kernel makes root the owner of such a process's files
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
    """Return the watch of a process, which all buffers share. The id must be of this process's own namespace.

    Raises:
        OSError: the system refuses, or this process may have no more descriptors open.
    """
    found = _watches.get(pid)
    if found is None or found.has_ended():  # the id may belong to another process by now
        found = _watches[pid] = Watch(pid)
    return found


def num_cores(pids: Iterable[int]) -> int:
    """Number of cores that the processes together may run on; all cores if the system does not report it.

    Ranks bound to a core each have as many cores as ranks; ranks of a job limited to a few cores have only these.
    """
    try:
        return len(set().union(*(os.sched_getaffinity(pid) for pid in pids)))
    except OSError:
        return os.cpu_count() or 1


UNKNOWN = "unknown "  # prefix of a place that the system does not report


def place() -> dict[str, Any]:
    """Return where process ids are valid, a host and its process-id namespace, and this process's id there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        where = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        where = UNKNOWN + secrets.token_hex(16)  # equals no other place
    return {"where": where, "pid": os.getpid()}
