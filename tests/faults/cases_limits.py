"""Rank functions for tests of limits on descriptors and threads; each returns what its rank saw."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from faults.cases_faults import good_round, open_buffer

from moe_rt import Buffer
from moe_rt.lab.testing.resources import held, left_of, limited


def at_the_descriptor_limit(group: Any, most: int) -> list[str]:
    """Rank 1 may open 0, 1, 2, ... more descriptors, until a buffer is made; then it dies. Return what the rank saw
    each time."""
    seen = []
    for left in range(most):
        with limited("descriptors", left) if group.rank() == 1 else contextlib.nullcontext():
            try:
                buffer = open_buffer(group)
            except RuntimeError as error:
                seen.append(f"{type(error).__name__}: {error}")
                continue
        good_round(buffer)
        return [*seen, _after_a_death(buffer, faulty_rank=1)]
    return seen


def _after_a_death(buffer: Buffer, faulty_rank: int) -> str:
    if buffer.rank == faulty_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        good_round(buffer)
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def descriptors_of_buffers(group: Any, count: int) -> list[int]:
    """Return this rank's number of open descriptors with 0, 1, 2, ... buffers, and after all are closed."""
    open_buffer(group).close()
    buffers, seen = [], []
    for _ in range(count):
        seen.append(len(os.listdir("/proc/self/fd")))
        buffers.append(open_buffer(group))
        good_round(buffers[-1])
    seen.append(len(os.listdir("/proc/self/fd")))
    for buffer in buffers:
        buffer.close()
    return [*seen, len(os.listdir("/proc/self/fd"))]


def without_address_space(group: Any) -> tuple[str, int]:
    """Rank 1 lacks address space for the stacks of its lanes; without the limit the same group works."""
    open_buffer(group).close()
    before = held()
    try:
        with limited("memory", 64) if group.rank() == 1 else contextlib.nullcontext():
            open_buffer(group, num_threads=64).close()
        text = "no error"
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    left = left_of(before)["threads"]
    with open_buffer(group, num_threads=3) as buffer:
        good_round(buffer)
    return text, left
