"""Finds where a late rank waits instead: perhaps in another buffer, for a rank that waits for it here.

If ranks run two layers in different orders, each layer with its own buffer, either buffer only shows a late rank. The
cause is visible only to a process that sees both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from moe_rt import _engine
from moe_rt.diagnostics.attach import segments_of
from moe_rt.diagnostics.collect import report_on
from moe_rt.diagnostics.report import name_ranks
from moe_rt.errors import MoeRtError
from moe_rt.memory import threads
from moe_rt.memory.segments import Segments


class _Other(NamedTuple):
    """Another buffer that the late rank has open. `late` and `own` are the ranks in it of that rank and of this one."""

    members: list[tuple[int, int]]
    mappings: list[Any]
    late: int
    own: int | None  # None if this rank has no part in it


def elsewhere(segments: Segments, rank: int, late: int, since_ns: int) -> str:
    """Say that rank `late` waits in another buffer, or has given up waiting there; "" if nothing is known.

    Args:
        segments: segments of the buffer where `rank` waits for `late`.
        since_ns: time when `rank` began to wait. Ops that ended there earlier do not explain the delay.
    """
    with suppress(MoeRtError, OSError):  # dead, or another user's: the report says so
        for other in _others(segments, rank, late):
            found = report_on(other.members, other.mappings, [None] * len(other.members)).ranks[other.late]
            if not found.waits_for or 0 < found.last_ops[-1].end_ns < since_ns:
                continue
            where = f"rank {late} waits in {found.last_ops[-1]} of another buffer of {len(other.members)} ranks"
            if other.own in found.waits_for:
                return f"{where}, for this rank: all ranks must use their buffers in the same order"
            return f"{where}, for {name_ranks(found.waits_for)} there"
    return ""


def _others(segments: Segments, rank: int, late: int) -> Iterator[_Other]:
    pid, inode = segments.members[late]
    if inode == 0:
        for there in threads.others_of(segments, late):
            if mappings := list(there.mappings):  # empty if that buffer is closed
                yield _Other(there.members, mappings, late, rank)
        return
    found = segments_of(pid)
    groups = set()
    for mapping in found.values():
        with suppress(ValueError):  # still being made, or overwritten
            groups.add(tuple(_engine.read_segment(mapping).members))
    for group in groups - {tuple(segments.members)}:
        pids = [member for member, _ in group]
        if pid in pids:
            own = pids.index(os.getpid()) if os.getpid() in pids else None
            yield _Other(list(group), [found.get(inode) for _, inode in group], pids.index(pid), own)
