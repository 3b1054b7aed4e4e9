"""Lets the streams of virtual ranks begin together, after their hosts have queued what is timed."""

from __future__ import annotations

import threading

import torch

# About 1 ms. Hosts of virtual ranks meet and then take turns under Python's lock: 3 ms were too few for eight of them,
# since ops of few tokens then seemed to take 1 to 2 ms, and 0.02 to 0.2 ms in a replayed graph (H200, 2026-11-27).
_CYCLES_OF_A_MS = 2_000_000


class StreamGate:
    """Barrier of streams: none of the ranks' streams continues until all have arrived.

    Hosts wait for each other, not for the device: a stream is held for some ms, in which all hosts queue what follows.

    Args:
        size: number of ranks.
        seconds: maximum time that a host waits for the others.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self._size, self._seconds = size, seconds
        self._barrier = threading.Barrier(size)
        self._events: list[list[torch.cuda.Event]] = [[], []]
        self._here = threading.local()

    def wait(self) -> torch.cuda.Event:
        """Hold the current stream until all streams are here. Every rank must call this the same number of times.

        Returns:
            An event of one stream before it is let go, the same on every rank.
        """
        torch.cuda._sleep((2 + self._size) * _CYCLES_OF_A_MS)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._size == 1:
            return event
        turn = self._here.turn = getattr(self._here, "turn", 0) + 1
        if self._barrier.wait(self._seconds) == 0:
            self._events[(turn + 1) % 2] = []  # the previous meeting's, which all ranks have left
        self._events[turn % 2].append(event)
        self._barrier.wait(self._seconds)
        for other in self._events[turn % 2]:
            other.wait()
        return self._events[turn % 2][0]
