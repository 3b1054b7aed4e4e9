"""Training continues without a dead rank exactly as a smaller run that resumes from the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic import cases_elastic as cases
from support.ranks import ProcessRanks, Ranks

from moe_rt.train import metrics


def rows(out: Path) -> list[dict[str, Any]]:
    read = metrics.read(out / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in read]


def test_continues_as_a_run_resumed_on_fewer_ranks(make_ranks: Callable[[str, int], Ranks], tmp_path: Path) -> None:
    run, before = tmp_path / "run", tmp_path / "run-before"
    ranks = ProcessRanks(3)
    seen = ranks.outcomes(cases.train_through_a_death, run, 5)
    ranks.close()
    assert isinstance(seen.pop(1), ChildProcessError)
    assert seen == [(0, 2), (1, 2)]
    assert [path.name for path in (before / "checkpoints").iterdir()] == ["step-00000003"]

    make_ranks("shm", 2).run(cases.resume, before)
    assert [row["step"] for row in rows(run) if "loss" in row] == list(range(1, 9))
    assert rows(run) == rows(before)
