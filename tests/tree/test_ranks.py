"""The harness that runs cases on ranks: one case's leftovers are not taken for the next one's answer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import support.ranks

from moe_rt.lab.testing.resources import left_of


def answer_after(group: Any, seconds: float, answer: str) -> str:
    time.sleep(seconds)
    return answer


def test_a_case_that_hangs_answers_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = support.ranks.ProcessRanks(2)
    try:
        assert ranks.run(answer_after, 0.0, "first") == ["first"] * 2
        with monkeypatch.context() as patch:
            patch.setattr(support.ranks, "CASE_TIMEOUT_S", 0.1)
            with pytest.raises(TimeoutError, match="rank 0 did not finish"):
                ranks.run(answer_after, 1.0, "late")
        assert ranks.run(answer_after, 0.0, "next") == ["next"] * 2
    finally:
        ranks.close()


def test_what_is_on_its_way_out_is_not_left_behind() -> None:
    counts = iter([3, 3, 2])
    assert left_of({"threads": 2}, lambda: {"threads": next(counts)}) == {"threads": 0}
