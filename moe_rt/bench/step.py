"""The unit of timing: one op of one contestant, and how to tell that it did what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Unavailable(Exception):
    """This contestant cannot take part here; the message says why, and what to install if that helps."""


@dataclass(frozen=True)
class Step:
    """One op of one contestant. It runs without gradients unless it turns them on itself.

    Attributes:
        run: does the op on input number `i` (taken modulo the number of inputs) and returns its output; this is timed.
        check: raises WrongOutput unless the output of `run(i)` is right.
        phase: which part of the case this is, where it has several: "forward", "forward+backward".
    """

    run: Callable[[int], Any]
    check: Callable[[int, Any], None]
    phase: str = ""
