"""The harness that runs cases on ranks: one case's leftovers are not taken for the next one's answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import support.ranks
from support.held_resources import MARGINS, left_behind

from moe_rt.lab.testing import resources
from moe_rt.lab.testing.resources import left_of


def answer_when(group: Any, path: Path, answer: str) -> str:
    """Answer when there is something at the path."""
    deadline = time.monotonic() + support.ranks.CASE_TIMEOUT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return answer


def test_a_case_that_hangs_answers_no_later_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks, come = support.ranks.ProcessRanks(2), tmp_path / "come"
    try:
        assert ranks.run(answer_when, tmp_path, "first") == ["first"] * 2
        with monkeypatch.context() as patch:
            patch.setattr(support.ranks, "CASE_TIMEOUT_S", 0.1)
            with pytest.raises(TimeoutError, match="rank 0 did not finish"):
                ranks.run(answer_when, come, "late")
        come.touch()
        assert ranks.run(answer_when, come, "next") == ["next"] * 2
    finally:
        ranks.close()


def test_what_is_on_its_way_out_is_not_left_behind() -> None:
    counts = iter([3, 3, 2])
    assert left_of({"threads": 2}, lambda: {"threads": next(counts)}) == {"threads": 0}


def test_growth_within_its_margin_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before, most = dict.fromkeys(MARGINS, 5), 5 + MARGINS["resident MiB"]
    counts = iter([{**before, "threads": 6}, {**before, "resident MiB": most}])
    assert left_behind(before, lambda: next(counts)) == {}, "a thread ends meanwhile"
    monkeypatch.setattr(resources, "_PATIENCE_S", 0.0)
    after = {**before, "threads": 7, "resident MiB": most + 1}
    assert left_behind(before, lambda: after) == {"threads": 2, "resident MiB": 1 + MARGINS["resident MiB"]}
