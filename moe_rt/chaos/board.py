"""Progress of every rank of a pool, readable by all ranks and by the process that injects faults."""

from __future__ import annotations

import mmap
import time


class Board:
    """One page of memory shared with every process forked later.

    Attributes:
        began: time when each rank last began an operation, in monotonic seconds; it survives a rank killed in it.
        step: number of steps that each rank has begun; -1 before it joins this session.
        steps: number of steps of each rank's session. Stop a working rank before changing it.
    """

    def __init__(self, size: int) -> None:
        page = memoryview(mmap.mmap(-1, 8 * 3 * size))
        self.began = page[: 8 * size].cast("d")
        self.step = page[8 * size : 16 * size].cast("q")
        self.steps = page[16 * size :].cast("q")

    def begin(self, rank: int) -> None:
        """Record that the rank begins an operation now."""
        self.began[rank] = time.monotonic()
