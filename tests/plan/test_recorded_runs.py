"""Recorded measurements of one machine give the documented errors again, and searches find their best configuration."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from moe_rt.plan.points import parse
from moe_rt.plan.tune import SEARCHES, Space, trials_to_best

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "bench" / "results" / "epyc-zen5-2core-2026-11-28"


def program(name: str) -> ModuleType:
    """Import a program of bench/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(name: str) -> list[dict[str, str]]:
    with (RECORDED / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_of_this_machine_have_the_recorded_errors() -> None:
    check, recorded = program("plan_check"), json.loads((RECORDED / "errors.json").read_text())
    parts = [[parse(line) for line in lines(f"{part}-dispatch.csv")] for part in check.PARTS]
    errors, _ = check.errors_of(*parts)
    assert check.figures_of(errors) == pytest.approx(recorded["ops"]["dispatch"], abs=2e-3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_recorded_run_of_the_trainer_is_replayed(ranks: int) -> None:
    replay = program("plan_replay")
    part: dict[str, Any] = json.loads((RECORDED / f"replay-{ranks}.json").read_text())
    rows = [row for row in map(parse, lines(f"replay-layers-{ranks}.csv")) if row.op == replay.OP]
    found = replay.replayed(part, rows)
    (recorded,) = (
        one for one in json.loads((RECORDED / "replay.json").read_text())["replays"] if one["ranks"] == ranks
    )
    assert found["error"] == pytest.approx(recorded["error"], abs=2e-3)


def test_the_learned_search_needs_fewer_real_runs() -> None:
    known = json.loads((RECORDED / "tune.json").read_text())["costs"]
    names = [name for name in known[0] if name != "us"]
    space = Space({name: tuple(dict.fromkeys(one[name] for one in known)) for name in names})
    costs = np.median([one["us"] for one in known], axis=1)
    needed = {
        name: np.median([trials_to_best(search, space, costs, seed) for seed in range(10)])
        for name, search in SEARCHES.items()
    }
    assert needed["cubic"] < needed["random"] / 2, needed
