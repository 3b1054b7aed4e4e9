"""Sets limits of the system on this process for a while: few descriptors, little memory, no threads."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice

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
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    return (fd for fd in count() if fd not in used)


def _address_space() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()
