"""When faults strike in the tests of engines and servers, and how long ranks then wait for each other."""

from __future__ import annotations

BEYOND_THE_START = 200  # sequence number of an op; making an engine takes fewer ops
TIMEOUT_S = 20.0  # also for the first ops, when one engine may be made much later than another
