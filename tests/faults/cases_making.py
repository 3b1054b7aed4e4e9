"""What ranks do in the tests of buffers that cannot be made; each returns what its rank saw, and how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from cases_faults import good_round, open_buffer

CULPRIT = 1


def rank_of(group: Any) -> int:
    return group.rank if isinstance(group.rank, int) else group.rank()


def seen_by(work: Callable[[], Any]) -> tuple[str, float]:
    """ "<error class>: <message>" of what `work` raised, and after how many seconds."""
    start, text = time.monotonic(), "no error"
    try:
        work()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - start


def make_then_again(group: Any, **changes: Any) -> tuple[str, float]:
    """The culprit makes a buffer with `changes`; afterwards the same group makes a good one."""
    seen = seen_by(lambda: open_buffer(group, **(changes if rank_of(group) == CULPRIT else {})).close())
    with open_buffer(group) as buffer:
        good_round(buffer)
    return seen


def wrong_argument(group: Any, name: str, value: Any) -> tuple[str, float]:
    return make_then_again(group, **{name: value})


def wrong_isa(group: Any) -> tuple[str, float]:
    """What only the engine looks at, when the segments are there."""
    if rank_of(group) == CULPRIT:
        os.environ["MOE_RT_ISA"] = "pdp11"
    seen = seen_by(lambda: open_buffer(group).close())
    os.environ.pop("MOE_RT_ISA", None)
    with open_buffer(group) as buffer:
        good_round(buffer)
    return seen
