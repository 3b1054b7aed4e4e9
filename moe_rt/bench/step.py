"""The unit of timing: one op of one contestant, and the check of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Unavailable(Exception):
    """Raised if a contestant cannot run here; the message says why, and what to install if that helps."""


@dataclass(frozen=True)
class Step:
    """One op of one contestant. It runs without gradients unless it enables them itself.

    Attributes:
        run: runs the op on input number `i` (modulo the number of inputs) and returns its output; this is timed.
        check: raises WrongOutput unless the output of `run(i)` is right.
        phase: name of this part of a case with several parts: "forward", "forward+backward".
    """

    run: Callable[[int], Any]
    check: Callable[[int, Any], None]
    phase: str = ""
