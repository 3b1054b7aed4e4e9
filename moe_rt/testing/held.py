"""Counts resources of a process that a library could leak, before and after it is used."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
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
