"""Records that ranks write into a store for other ranks. Reading never waits, and ignores malformed records.

A key may vanish between two reads, and its value may be of any origin. So nothing here waits for a key, and each field
is checked before it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_rt.errors import StoreLost

_NOTHING = "nothing"
# A rank's place: its ticket, "" if it has none; where its process is; when it was written; why the rank left meetings.
_PLACE = {"ticket": str, "where": str, "pid": int, "since": float, "failures": list}
# Why and when a rank left. Failures in a place also have the last meeting that took place before, the number of the
# attempt since then, and the tickets of the ranks that had arrived, in rank order, "" for the others.
_FAILURE = {"rank": int, "error": str, "message": str, "since": float, "after": str, "number": int, "came": list}


def read(store: Store, key: str) -> str | None:
    """Return the key's value, None if it is absent. `Store.get` would wait for it until the store's time-out."""
    text = store.compare_set(key, _NOTHING, _NOTHING).decode(errors="replace")
    return None if text == _NOTHING else text


def place_of(text: str | None) -> dict[str, Any] | None:
    """Parse a rank's place without its malformed failures; None if the place itself is malformed."""
    if (found := _record(text, _PLACE)) is not None:
        found["failures"] = [failure for failure in found["failures"] if _fits(failure, _FAILURE)]
    return found


def failure_of(text: str) -> dict[str, Any] | None:
    """Parse why a rank left; None if the text is malformed."""
    return _record(text, _FAILURE)


def _record(text: str | None, fields: dict[str, type]) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text or "")
        if _fits(found, fields):
            return dict(found)
    return None


def _fits(found: Any, fields: dict[str, type]) -> bool:
    return isinstance(found, dict) and all(type(found.get(name)) is kind for name, kind in fields.items())


def is_of_now(found: dict[str, Any]) -> bool:
    """True if a place or failure was written since this process started: in the same attempt of a job.

    A launcher that restarts ranks ends all of them first, and a rank arrives at its first meeting after it has made a
    process group with the others. Hosts' clocks may differ. A rank mistaken for one of another attempt still meets its
    peers; only its failures, or its end, are not noticed before the timeout.
    """
    return bool(found["since"] >= _started(os.getpid()))


def _started(pid: int) -> float:
    """Time at which this process started; 0 if the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return _boot_time() + ticks / os.sysconf("SC_CLK_TCK")


def _boot_time() -> float:
    """Time at which this host started, by the best of three readings: a thread may lose its core between two clocks."""
    readings = []
    for _ in range(3):
        before, now = time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
        readings.append((time.clock_gettime(time.CLOCK_BOOTTIME) - before, now - before))
    return min(readings)[1]


@contextlib.contextmanager
def reaching_store(rank: int) -> Iterator[None]:
    """Convert torch's errors of a store that has ended to StoreLost."""
    try:
        yield
    except dist.DistError as error:
        message = (
            f"rank {rank} cannot reach the group's store any more, expected one that outlives every rank: "
            "served by the process that starts ranks, or a file"
        )
        raise StoreLost(message, rank=rank) from error
