"""Statuses, ops and phases have the numbers of the headers, and errors have all of their fields."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_rt import errors
from moe_rt.errors import Code, InvalidConfig, Op, Phase

ROOT = Path(__file__).resolve().parents[2]


def enumerators(header: str, name: str) -> dict[str, int]:
    """Return {SCREAMING_NAME: value} of `enum class name` in a header."""
    text = (ROOT / header).read_text()
    body = re.search(rf"enum class {name} : int32_t {{(.*?)}};", text, re.S)
    assert body is not None
    pairs = re.findall(r"k(\w+) = (\d+)", body.group(1))
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", n).upper(): int(v) for n, v in pairs}


@pytest.mark.parametrize("kind", [Code, Op, Phase])
def test_enumerators_agree(kind: type) -> None:
    assert {e.name: e.value for e in kind} == enumerators("cuda/protocol/core/status.h", kind.__name__)


def test_an_error_in_full() -> None:
    error = errors.PeerDead("gone")
    assert (error.rank, error.peer, error.op, error.seq, error.phase, error.report) == (-1, -1, 0, 0, 0, None)
    errors.expect(True, "size", 3, "less")
    with pytest.raises(InvalidConfig) as raised:
        errors.expect(False, "size", 3, "less")
    assert str(raised.value) == "size: got 3, expected less (moe-rt docs errors#invalidconfig)"
