"""Rank functions for tests of how peers learn which rank failed first; each returns what its rank saw."""

from __future__ import annotations

import sys
import time
from typing import Any

from faults.cases_failures import first_round
from faults.cases_faults import good_round, open_buffer

from moe_rt.errors import MoeRtError

FIRST_LINE = "bad batch"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError(f"{FIRST_LINE}\nand a second line"),
    "KeyError": KeyError("weight"),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "nothing said": OSError(),
    "no text": Unspeakable(),
    "too long": ValueError("ü" * 3000),
    "control characters": ValueError("a\x1b[2Jb\u202ec\0d"),
    "surrogate": ValueError("file \udcff"),
}


def leave_by(group: Any, faulty_rank: int, name: str, how: str) -> str:
    """The faulty rank leaves between two rounds, by its `with` block or by abort(); the others return their error."""
    try:
        with open_buffer(group) as buffer:
            good_round(buffer)
            if buffer.rank == faulty_rank:
                try:
                    raise ERRORS[name]
                except BaseException:
                    if how == "abort":
                        buffer.abort()
                    raise
            good_round(buffer)
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return type(error).__name__
    return "no error"


def collective_fails(group: Any, faulty_rank: int, kind: type[Exception]) -> str:
    """The faulty rank leaves by its own error; the others, by an error that a collective of torch may have raised."""
    try:
        with open_buffer(group) as buffer:
            first_round(group, buffer)
            if buffer.rank == faulty_rank:
                raise ValueError(FIRST_LINE)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    buffer.check()
                except MoeRtError:
                    raise kind("Connection closed by peer") from None
                time.sleep(0.01)
    except Exception as error:
        return f"{type(error).__name__}: {error} | {type(error.__cause__).__name__}"
    return "no error"


def end_program(group: Any, faulty_rank: int, how: str) -> None:
    """The faulty rank's program ends between two rounds, outside `with`; the others print their error."""
    sys.modules["__main__"].kept = buffer = open_buffer(group)  # type: ignore[attr-defined]  # outlives every frame
    good_round(buffer)
    if buffer.rank == faulty_rank:
        if how == "error":
            raise ValueError(FIRST_LINE)
        if how == "interrupt":
            raise KeyboardInterrupt
        sys.exit(0)
    try:
        good_round(buffer)
    except MoeRtError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def let_go(group: Any, faulty_rank: int) -> str:
    """The faulty rank's thread ends by an exception that nothing references, and its buffer is garbage collected."""
    if group.rank == faulty_rank:
        good_round(open_buffer(group))
        return "gone"
    buffer = open_buffer(group)
    good_round(buffer)
    try:
        good_round(buffer)
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
