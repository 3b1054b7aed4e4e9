"""Heap for ranks that are processes of one host: a sealed memfd per rank, opened by its peers through /proc.

A memfd has no name: nothing is left in /dev/shm however a rank dies, a small /dev/shm does not limit it, and no other
user can open it. Its pages are reserved when it is made, so a lack of memory is an error here and not a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from typing import Any

from moe_rt.errors import CorruptPeer, InvalidConfig, OutOfSharedMemory, SegmentPermission
from moe_rt.group.all_or_none import all_or_none, take_all_or_none
from moe_rt.group.processes import watch, why_closed
from moe_rt.group.rendezvous import Rendezvous
from moe_rt.memory.memory_limits import available_bytes
from moe_rt.memory.segments import Segments, address_of, ask_for_huge_pages, no_memory

MEMFD_NAME = "moe_rt"
# A peer must not be able to shrink the segment: this rank's next access would raise SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_RECORD = {"pid": int, "fd": int, "dev": int, "ino": int, "host": str}  # fields of a rank's record of its segment
_MFD_NOEXEC_SEAL = 8  # linux/memfd.h
_MADV_POPULATE_WRITE = 23  # linux/mman.h; faults all pages in, huge ones where the mapping asks for them


def allocate(rendezvous: Rendezvous, num_bytes: int, timeout_s: float) -> Segments:
    """Make this rank's segment and map every peer's. Collective: either every rank succeeds or every rank raises.

    Raises:
        OutOfSharedMemory: some rank could not reserve its segment.
        SegmentPermission: some rank could not open a peer's segment, or found something else in its place.
        InvalidConfig: ranks are on different hosts.
        CorruptPeer: the record from some rank does not describe a segment.
    """
    opened: list[int] = []  # needed only until every rank has mapped them: a mapping keeps a duplicate
    segments = Segments([], [], [])

    def look() -> dict[str, Any]:
        return look_for_room(num_bytes * rendezvous.size, rendezvous.rank)

    def make() -> dict[str, Any]:
        return make_segment(num_bytes, opened, rendezvous.rank)

    def attach() -> None:
        _attach_all(rendezvous.rank, records, num_bytes, opened, segments)

    try:
        all_or_none(rendezvous, look, "look for free memory", timeout_s)  # every rank checks before any allocates
        records = all_or_none(rendezvous, make, "make its segment", timeout_s)
        take_all_or_none(rendezvous, attach, "map its peers' segments", timeout_s)
    except BaseException:
        segments.release()
        raise
    finally:
        for fd in opened:
            os.close(fd)
    return segments


def look_for_room(num_bytes: int, rank: int) -> dict[str, Any]:
    """Check that memory suffices. Reserving too much would not fail: it would wake the kernel's out-of-memory killer.

    Raises:
        OutOfSharedMemory: the segments of this host's ranks need more than is available.
    """
    available = available_bytes()
    if num_bytes > available:
        message = f"rank {rank}: got segments of {num_bytes} bytes for all ranks of this host, expected at most"
        raise OutOfSharedMemory(f"{message} {available}", rank=rank)
    return {}


def make_segment(num_bytes: int, opened: list[int], rank: int) -> dict[str, Any]:
    """Make a segment of this rank, append its descriptor to `opened`, and return what peers on this host need.

    Raises:
        OutOfSharedMemory, SegmentPermission: the system refuses.
    """
    try:
        return _create(num_bytes, opened)
    except (OSError, ValueError, OverflowError) as error:
        if no_memory(error):
            raise _out_of_memory(error, num_bytes, rank) from error
        raise SegmentPermission(f"rank {rank} could not make a segment: {error}") from error


def _create(num_bytes: int, opened: list[int]) -> dict[str, Any]:
    fd = _memfd()
    opened.append(fd)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    with mmap.mmap(fd, num_bytes) as mapping:
        ask_for_huge_pages(mapping)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.posix_fallocate(fd, 0, num_bytes)  # kernels before 5.14
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    stat = os.fstat(fd)
    with open("/proc/sys/kernel/random/boot_id") as f:
        host = f.read().strip()
    return {"pid": os.getpid(), "fd": fd, "dev": stat.st_dev, "ino": stat.st_ino, "host": host}


def _memfd() -> int:
    """Return an empty memfd that can be sealed and, if the kernel supports that, never executed.

    Kernels from 6.3 on may refuse others (vm.memfd_noexec = 2), and log a complaint. They add a seal of their own, so
    `attach_segment` checks for the seals that it needs and not for an exact set.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(MEMFD_NAME, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(MEMFD_NAME, flags)  # an older kernel


def _out_of_memory(error: Exception, num_bytes: int, rank: int) -> OutOfSharedMemory:
    why = error.strerror if isinstance(error, OSError) else error
    return OutOfSharedMemory(f"rank {rank} could not reserve a segment of {num_bytes} bytes: {why}", rank=rank)


def _attach_all(me: int, records: list[dict[str, Any]], num_bytes: int, opened: list[int], segments: Segments) -> None:
    for peer, record in enumerate(records):
        _check_record(me, peer, record)
        if record["host"] != records[me]["host"]:
            message = f'heap "shm": got rank {peer} on another host than rank {me}, expected one host'
            raise InvalidConfig(f'{message}; heap "ucx" is for several')
        attach_segment(me, peer, record, num_bytes, opened, segments)


def _check_record(me: int, peer: int, record: dict[str, Any]) -> None:
    """Check a record before a path is formed from it."""
    if {name: type(value) for name, value in record.items()} != _RECORD:
        message = f"segment of rank {peer}: got the record {record}, expected the fields {list(_RECORD)}"
        raise CorruptPeer(message, rank=me, peer=peer)


def attach_segment(
    me: int, peer: int, record: dict[str, Any], num_bytes: int, opened: list[int], segments: Segments
) -> None:
    """Map the segment of a peer on this host, or this rank's own, as its `record` describes it.

    Raises:
        CorruptPeer, SegmentPermission, OutOfSharedMemory: as `allocate`.
    """
    _check_record(me, peer, record)
    path = f"/proc/{record['pid']}/fd/{record['fd']}"
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        message = f"rank {me} cannot open the segment of rank {peer} ({error.strerror}): {why_closed(record['pid'])}"
        raise SegmentPermission(message, rank=me, peer=peer) from error
    opened.append(fd)
    stat = os.fstat(fd)
    got = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_uid, _seals(fd) & _SEALS)
    expected = (record["dev"], record["ino"], num_bytes, os.geteuid(), _SEALS)
    if got != expected:
        message = f"segment of rank {peer}: got device, inode, size, user, seals {got}, expected {expected}"
        raise SegmentPermission(message, rank=me, peer=peer)
    try:
        mapping = mmap.mmap(fd, num_bytes)
    except OSError as error:
        if not no_memory(error):
            raise
        raise _out_of_memory(error, num_bytes, me) from error
    ask_for_huge_pages(mapping)
    segments.mappings.append(mapping)
    segments.addresses.append(address_of(mapping))
    segments.members.append((record["pid"], record["ino"]))
    segments.watches.append(None if peer == me else watch(record["pid"]))


def _seals(fd: int) -> int:
    """Return the seals of a memfd; 0 for another file, which has none."""
    with contextlib.suppress(OSError):
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    return 0
