"""What every rank of a pool and the process that injects faults into them see at once, without asking."""

from __future__ import annotations

import mmap
import time


class Board:
    """One page of memory that is shared with every process forked later.

    Attributes:
        began: when each rank last began something, monotonic seconds: what is left of a rank that was killed in it.
        step: how many steps each rank has begun; -1 before it came to this session.
        steps: how many steps each rank's session has. Whoever changes it while a rank works stops it first.
    """

    def __init__(self, size: int) -> None:
        page = memoryview(mmap.mmap(-1, 8 * 3 * size))
        self.began = page[: 8 * size].cast("d")
        self.step = page[8 * size : 16 * size].cast("q")
        self.steps = page[16 * size :].cast("q")

    def begin(self, rank: int) -> None:
        """The rank begins something now."""
        self.began[rank] = time.monotonic()
