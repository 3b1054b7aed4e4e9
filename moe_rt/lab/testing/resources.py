"""Counts resources of this process that a library could leak, and limits resources for a while."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

_PATIENCE_S = 10.0


def held() -> dict[str, int]:
    """Count this process's open descriptors, threads, and mappings of ranks' segments, without garbage."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": Path("/proc/self/maps").read_text().count("memfd:moe_rt"),
    }


def left_of(before: dict[str, int], look: Callable[[], dict[str, int]] = held) -> dict[str, int]:
    """Return how many more resources are in use now than before.

    The system lists a thread for a moment after it has been joined, so this waits for the counts to fall.
    """
    deadline = time.monotonic() + _PATIENCE_S
    left = _more(before, look())
    while any(count > 0 for count in left.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
        left = _more(before, look())
    return left


def _more(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in now.items()}


MIB = 1 << 20
KINDS = ("descriptors", "memory", "threads")


@contextmanager
def limited(kind: str, room: int) -> Iterator[None]:
    """Limit this process to `room` more descriptors, MiB of address space, or MiB for threads' stacks.

    If the system counts this user's threads, "threads" permits no new one. It does not count those of root.
    """
    if kind == "descriptors":
        which, most = resource.RLIMIT_NOFILE, next(islice(_unused_descriptors(), room, None))
    elif kind == "threads" and os.geteuid():
        which, most = resource.RLIMIT_NPROC, 1
    else:
        which, most = resource.RLIMIT_AS, _address_space() + room * MIB
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def _unused_descriptors() -> Iterator[int]:
    used = Path("/proc/self/fd")
    return (fd for fd in count() if not os.path.lexists(used / str(fd)))


def _address_space() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()
