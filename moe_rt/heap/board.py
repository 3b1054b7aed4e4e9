"""What ranks write into a store that others read: read without waiting, and taken for nothing where it is no record.

A key may vanish between two looks, and what stands there may be anybody's: so nothing here waits for a key, and each
field is looked at before it is used.
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
# Of a rank's place: the ticket that it holds, "" for none; where its process is; when it wrote; why it left meetings.
_PLACE = {"ticket": str, "where": str, "pid": int, "since": float, "failures": list}
# Why and when a rank left. In a place also: after which meeting that took place, in which attempt since then, and the
# tickets of those that had come by then, in rank order, "" for the others.
_FAILURE = {"rank": int, "error": str, "message": str, "since": float, "after": str, "number": int, "came": list}


def read(store: Store, key: str) -> str | None:
    """What the key holds, None where it is not there. `Store.get` would wait for it as long as the store's time-out."""
    text = store.compare_set(key, _NOTHING, _NOTHING).decode(errors="replace")
    return None if text == _NOTHING else text


def place_of(text: str | None) -> dict[str, Any] | None:
    """A rank's place, with those of its failures that are some; None where it is none."""
    if (found := _record(text, _PLACE)) is not None:
        found["failures"] = [failure for failure in found["failures"] if _fits(failure, _FAILURE)]
    return found


def failure_of(text: str) -> dict[str, Any] | None:
    """Why a rank left; None where the text does not say."""
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
    """Return whether a place or failure was written since this process started: in the same attempt of a job.

    A launcher that starts ranks anew ends all of them first, and a rank comes to its first meeting when it has made a
    process group with the others. Clocks of hosts may differ: who is taken for a rank of another attempt by mistake is
    met all the same, and only its failures, or its end, are not noticed before time is up.
    """
    return bool(found["since"] >= _started(os.getpid()))


def _started(pid: int) -> float:
    """When this process started; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def reaching_store(rank: int) -> Iterator[None]:
    """Raises StoreLost for torch's own errors of a store that has ended."""
    try:
        yield
    except dist.DistError as error:
        message = (
            f"rank {rank} cannot reach the group's store any more, expected one that outlives every rank: "
            "served by the process that starts ranks, or a file"
        )
        raise StoreLost(message, rank=rank) from error
