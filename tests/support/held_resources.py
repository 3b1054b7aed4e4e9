"""Resources of a process that a library could leak."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from moe_rt.lab.testing.resources import held as held_by_process
from moe_rt.lab.testing.resources import left_of

# Caches of torch grow for a while, and do not shrink.
MARGINS = {"descriptors": 0, "threads": 0, "segments": 0, "store keys": 0, "resident MiB": 150}


def held(group: dist.ProcessGroup) -> dict[str, int]:
    """Return counts of this process; those of the store's keys cover all ranks."""
    counts = held_by_process()
    ctypes.CDLL(None).malloc_trim(0)  # free pages between used blocks are not a leak
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    keys = _get_process_group_store(group).list_keys()
    return counts | {
        "store keys": sum("moe_rt" in key and not _of_group(key) for key in keys),
        "resident MiB": resident_pages * resource.getpagesize() >> 20,
    }


def _of_group(key: str) -> bool:
    """True if a group keeps this key in its store, for any number of buffers."""
    return key.split("/")[-2] in ("meetings", "places")


def left_behind(before: dict[str, int], look: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Return the counts that grew by more than the margins, and do not fall again."""
    most = {name: count + MARGINS[name] for name, count in before.items()}
    return {name: more + MARGINS[name] for name, more in left_of(most, look).items() if more > 0}
