"""Clock of a rank's layers: the time inside prepare and finalize, and inside the ops that these call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any


class Clock:
    """Nanoseconds of calls, in pairs: before the experts of a layer, and after them."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._ops: list[int] = []

    def watch(self, adapter: type, buffer: type | None = None) -> None:
        """Start timing all objects of these classes."""
        for name in ("prepare", "finalize"):
            setattr(adapter, name, _timed(getattr(adapter, name), self._layers))
        for name in ("dispatch", "combine") if buffer else ():
            setattr(buffer, name, _timed(getattr(buffer, name), self._ops))

    def clear(self) -> None:
        self._layers.clear()
        self._ops.clear()

    def layers(self) -> list[int]:
        """Time inside prepare and finalize, per layer."""
        return _pairs(self._layers)

    def ops(self) -> list[int]:
        """The part of layers() inside the buffer's dispatch and combine; empty without a buffer."""
        return _pairs(self._ops)


def _pairs(times: list[int]) -> list[int]:
    return [before + after for before, after in zip(times[::2], times[1::2], strict=True)]


def _timed(call: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter_ns()
        result = call(*args, **kwargs)
        times.append(perf_counter_ns() - start)
        return result

    return timed
