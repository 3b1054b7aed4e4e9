"""Reports on the groups of another process of the same user, whose open descriptors are the segments.

A rank has every peer's segment open, so one process leads to all ranks, including dead ones. The ranks take no part:
they may run, hang in an op, or be stopped. Mappings are read-only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from moe_rt import _engine
from moe_rt.diagnostics.collect import report_on
from moe_rt.diagnostics.report import Report
from moe_rt.errors import InvalidConfig, SegmentPermission
from moe_rt.group.processes import why_closed
from moe_rt.memory.shm import MEMFD_NAME


def attach(pid: int) -> list[Report]:
    """Return a report for each buffer with heap "shm" that process `pid`, or one that it has started, has open.

    A server's ranks are children of the process that its owner knows.

    Raises:
        SegmentPermission: it is another user's process, or the system denies access for another reason.
        InvalidConfig: the process does not exist, or none of these processes has such a buffer.
    """
    segments = segments_of(pid)
    for child in _descendants(pid):
        with contextlib.suppress(InvalidConfig, SegmentPermission):  # ended meanwhile, or another user's
            segments |= segments_of(child)
    groups: dict[tuple[tuple[int, int], ...], None] = {}  # keyed by members, which all segments of a group name
    for mapping in segments.values():
        with contextlib.suppress(ValueError):  # still being made, or overwritten
            groups[tuple(_engine.read_segment(mapping).members)] = None
    if not groups:
        raise InvalidConfig(
            f'pid: got process {pid} without a buffer, expected a rank of one with heap "shm", or what has started it'
        )
    return [report_on(g, [segments.get(inode) for _, inode in g], [None] * len(g)) for g in groups]


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
            parent = int(stat.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, new = list[int](), [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def segments_of(pid: int) -> dict[int, mmap.mmap]:
    """Map what `pid` has open as segments, by inode. Only sealed files: others could shrink under the reader."""
    segments = {}
    try:
        paths = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(path) != f"/memfd:{MEMFD_NAME} (deleted)":
                    continue
                with open(path, "rb", buffering=0) as file:
                    stat = os.fstat(file.fileno())
                    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK and stat.st_size > 0:
                        segments[stat.st_ino] = mmap.mmap(file.fileno(), stat.st_size, access=mmap.ACCESS_READ)
    except PermissionError as error:
        message = f"process {pid}: got no permission to read its descriptors: {why_closed(pid)}"
        raise SegmentPermission(message) from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise InvalidConfig(f"pid: got {pid}, which is no process here, expected a rank of a buffer") from error
    return segments
