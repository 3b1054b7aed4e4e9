"""A record of results notices what differs from it: tests/support/recorded.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recorded import NEAR, assert_on_record, entries, results_of, write_record

from moe_rt.errors import InvalidInput

FOUND: dict[str, Any] = {"a": 1, "b": [1.5, "x", None], "c": {"d": True, "e": 0.0}}


def refused() -> None:
    raise InvalidInput("x: got 1, expected 2")


def test_results_are_those_written(tmp_path: Path) -> None:
    record, long = tmp_path / "record.json", {str(number): "é" * 100 for number in range(20)}
    write_record(record, {"short": FOUND, "long": long})
    assert entries(record) == {"short": FOUND, "long": long}
    expected = ["{", "short", "long: {", *long, "}", "}"]
    assert len(record.read_text(encoding="utf-8").splitlines()) == len(expected), "long results have more lines"
    assert_on_record(record, "short", {**FOUND, "b": (1.5 + 1e-6, "x", None)})
    assert_on_record(record, "long", long)


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({**FOUND, "a": 2}, "n.a: got 2, on record 1"),
        ({**FOUND, "a": 1.1}, "n.a: got 1.1, on record 1"),
        ({**FOUND, "a": True}, "n.a: got True, on record 1"),
        ({**FOUND, "b": [1.5 + 1e-4, "x", None]}, "n.b[0]: got"),
        ({**FOUND, "b": [1.5, "x"]}, "n.b: got"),
        ({**FOUND, "c": {"d": True, "e": 3 * NEAR}}, "n.c.e: got"),
        ({**FOUND, "f": 0}, "n.f: not on record"),
        ({"a": 1, "b": FOUND["b"]}, "n.c: only on record"),
        ({"b": FOUND["b"], "a": 1, "c": FOUND["c"]}, "n: got the order"),
        (None, "n: got None"),
    ],
)
def test_differences_are_named(tmp_path: Path, changed: Any, place: str) -> None:
    record = tmp_path / "record.json"
    write_record(record, {"n": FOUND})
    with pytest.raises(AssertionError) as raised:
        assert_on_record(record, "n", changed)
    assert place in str(raised.value)


def test_a_result_without_a_record(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", {"n": FOUND})
    with pytest.raises(AssertionError):
        assert_on_record(tmp_path / "record.json", "m", FOUND)


def test_refusals_are_results() -> None:
    assert results_of({"good": lambda: (1, 2.0), "bad": refused}) == {
        "good": [1, 2.0],
        "bad": "InvalidInput: x: got 1, expected 2",
    }
