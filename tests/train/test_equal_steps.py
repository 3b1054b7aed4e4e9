"""sums="invariant" in the trainer: runs of 1, 2 and 4 ranks have the same bits, step for step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks
from train import cases_train as cases

from moe_rt.train import metrics

MakeRanks = Callable[[str, int], Ranks]
NUMBERS = ("loss", "grad_norm", "val_loss", "expert_load")  # without aux_loss, which is rounded on each rank


def numbers(out: Path) -> list[tuple[Any, ...]]:
    """Return what each row of a run's metrics says, apart from its speed."""
    return [(row["step"], name, row[name]) for row in metrics.read(out / "metrics.jsonl") for name in NUMBERS if name in row]


def trained(make_ranks: MakeRanks, world: int, out: Path, changes: dict[str, Any]) -> list[tuple[Any, ...]]:
    given = {"sums": "invariant", "out": out, "batch_size": 8, **changes}
    if world == 1:
        cases.run(None, given)
    else:
        make_ranks("shm", world).run(cases.run, given)
    return numbers(out)


def first_difference(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> str:
    return next((f"{one} and {other}" for one, other in zip(a, b, strict=True) if one != other), "")


def test_fifty_steps(make_ranks: MakeRanks, tmp_path: Path) -> None:
    alone = trained(make_ranks, 1, tmp_path / "1", {"num_experts": 8})
    assert len(alone) == 50 * 3 + 3
    for world in (2, 4):
        assert first_difference(trained(make_ranks, world, tmp_path / str(world), {"num_experts": 8}), alone) == ""
    # Two ranks begin, four go on: a checkpoint changes no bit either.
