"""Records that ranks write for each other: every field is checked, and only those of this attempt of a job count."""

from __future__ import annotations

import io
import itertools
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moe_rt.errors import StoreLost
from moe_rt.group import board

FAILURE: dict[str, Any] = {
    "rank": 1, "error": "PeerDead", "message": "m", "since": 1.5, "after": "", "number": 0, "came": [],
}  # fmt: skip
PLACE: dict[str, Any] = {"ticket": "t", "where": "here", "pid": 7, "since": 2.5, "failures": [FAILURE]}
OTHERS: list[Any] = [None, True, 1, 1.5, "1", [], {}]


def odd(record: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return each record that lacks a field, or has one of another type, with the field's name."""
    found = [(name, {n: v for n, v in record.items() if n != name}) for name in record]
    found += [
        (name, {**record, name: other})
        for name, value in record.items()
        for other in OTHERS
        if type(other) is not type(value)
    ]
    return found


def test_places() -> None:
    assert board.place_of(json.dumps({**PLACE, "more": 1})) == {**PLACE, "more": 1}
    assert [board.place_of(json.dumps(record)) for _, record in odd(PLACE)] == [None] * len(odd(PLACE))
    for text in (None, "", "x", "[]", "3", "null", "[" * 10**5, '"ticket"'):
        assert board.place_of(text) is None
    failures = [FAILURE, *(record for _, record in odd(FAILURE)), 3, None, {**FAILURE, "number": 2}]
    found = board.place_of(json.dumps({**PLACE, "failures": failures}))
    assert found == {**PLACE, "failures": [FAILURE, {**FAILURE, "number": 2}]}, "without those that are malformed"


def test_failures() -> None:
    assert board.failure_of(json.dumps(FAILURE)) == FAILURE
    assert [board.failure_of(json.dumps(record)) for _, record in odd(FAILURE)] == [None] * len(odd(FAILURE))
    assert board.failure_of("takes place") is None


def test_reading_waits_for_nothing() -> None:
    store = dist.HashStore()
    assert board.read(store, "key") is None
    assert board.read(store, "key") is None, "it writes nothing that counts"
    store.set("key", "text")
    assert board.read(store, "key") == "text"
    store.set("key", b"\xff")
    assert board.read(store, "key") == "\ufffd"


def started_at(monkeypatch: pytest.MonkeyPatch, stat: str | Exception, ticks_per_second: int = 100) -> None:
    """Let the system say of this process what `stat` holds; it was booted at 900.0, and now is 1000.0."""

    def opened(path: str) -> Any:
        assert path == f"/proc/{os.getpid()}/stat"
        if isinstance(stat, Exception):
            raise stat
        return io.StringIO(stat)

    clock = SimpleNamespace(time=lambda: 1000.0, clock_gettime=lambda which: {7: 100.0}[which], CLOCK_BOOTTIME=7)
    monkeypatch.setattr(board, "open", opened, raising=False)
    monkeypatch.setattr(board, "time", clock)
    monkeypatch.setattr(board.os, "sysconf", lambda name: {"SC_CLK_TCK": ticks_per_second}[name])


def stat_of(ticks: str) -> str:
    return f"5 (a ) 1 2 (b) S {' '.join(map(str, range(18)))} {ticks} 0 0"


@pytest.mark.parametrize(("ticks_per_second", "started"), [(100, 902.5), (50, 905.0)])
def test_records_of_this_attempt(monkeypatch: pytest.MonkeyPatch, ticks_per_second: int, started: float) -> None:
    """A record counts if it was written since this process started, at that moment as well."""
    started_at(monkeypatch, stat_of("250"), ticks_per_second)
    found = [board.is_of_now({"since": since}) for since in (0.0, started - 0.001, started, started + 0.001, 2000.0)]
    assert found == [False, False, True, True, True]


@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_a_thread_may_lose_its_core_between_two_clocks(monkeypatch: pytest.MonkeyPatch, interrupted: int) -> None:
    """The start of this process would otherwise be too early, and records of an earlier attempt would count."""
    started_at(monkeypatch, stat_of("250"))
    now, looks = [1000.0], itertools.count()
    monkeypatch.setattr(board.time, "time", lambda: now[0])

    def since_boot(which: int) -> float:
        found = now[0] - 900.0
        now[0] += 5.0 if next(looks) % 6 == 2 * interrupted else 0.0
        return found

    monkeypatch.setattr(board.time, "clock_gettime", since_boot)
    assert [board.is_of_now({"since": since}) for since in (902.499, 902.5)] == [False, True]


@pytest.mark.parametrize(
    "stat", [FileNotFoundError(), PermissionError(), stat_of("x"), "", "5 (a) S 1 2"], ids=range(5)
)
def test_all_records_count_if_the_start_is_not_known(monkeypatch: pytest.MonkeyPatch, stat: str | Exception) -> None:
    started_at(monkeypatch, stat)
    assert [board.is_of_now({"since": since}) for since in (-0.001, 0.0, 1.0)] == [False, True, True]


def test_a_store_that_has_ended() -> None:
    """Other errors are not converted."""
    cause = dist.DistNetworkError("broken pipe")
    with pytest.raises(StoreLost) as raised, board.reaching_store(3):
        raise cause
    assert (raised.value.rank, raised.value.__cause__) == (3, cause)
    assert str(raised.value).split(" (moe-rt")[0] == (
        "rank 3 cannot reach the group's store any more, expected one that outlives every rank: served by the process "
        "that starts ranks, or a file"
    )
    with pytest.raises(ZeroDivisionError), board.reaching_store(3):
        raise ZeroDivisionError
