"""A search avoids what cannot run: without memory, or at risk of too many rows; it never proposes or prints it."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_rt.errors import InvalidConfig
from moe_rt.plan import tune
from moe_rt.plan.models import Model

MODEL = Model("tiny", 8, 4, 4, 2, 1)
CLUSTER: Any = SimpleNamespace(gpus=4)
SPACE = tune.Space({"a": (1, 2, 4, 8, 16, 32), "b": ("x", "y", "z"), "c": (1, 2, 3, 4), "d": (0.1, 1.0, 10.0)})


def cost_or_none(number: int) -> float:
    """Return a cost that is least at a = 8, where nothing can run."""
    knobs = SPACE.at(number)
    if knobs["c"] == 4 or knobs["a"] in (4, 8):
        return math.inf
    off = {"x": 0.8, "y": 0.0, "z": 0.4}[str(knobs["b"])]
    apart = math.log2(float(knobs["a"])) - 3
    return math.exp(apart**2 / 4 + off + 0.2 * float(knobs["c"]) + abs(float(knobs["d"]) - 1))


def layer(**changes: Any) -> Any:
    overflow = SimpleNamespace(probability=0.01)
    return SimpleNamespace(**{"fits": True, "overflow": overflow, "step_us": 10.0, **changes})


@pytest.mark.parametrize(
    ("found", "runs"),
    [
        (layer(), True),
        (layer(fits=False), False),
        (layer(overflow=None), False),
        (layer(overflow=SimpleNamespace(probability=0.0100001)), False),
        (InvalidConfig("too many"), False),
    ],
    ids=["as much risk as is allowed", "no memory", "no known risk", "more risk", "refused"],
)
def test_what_a_plan_can_run(monkeypatch: pytest.MonkeyPatch, found: Any, runs: bool) -> None:
    """All micro-batches of a step count, and the smaller of two capacity factors is better by a trifle."""
    asked: list[tuple[Any, float]] = []

    def layer_of(model: Any, cluster: Any, one: Any, shares: Any, capacity_factor: float) -> Any:
        asked.append((one, capacity_factor))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(tune, "layer_of", layer_of)
    space = tune.plan_space(MODEL, CLUSTER, 12)
    judge = tune.plan_judge(MODEL, CLUSTER, 12, np.ones(4) / 4, space, risk=0.01)
    for number in range(space.size):
        knobs, cost = space.at(number), judge(number)
        one, factor = asked[-1]
        assert (one.ep_size, one.mode, one.payload) == (knobs["ep_size"], knobs["mode"], knobs["payload"])
        assert (one.tokens, one.chunks) == (12 // int(knobs["micro_batches"]), knobs["chunks"])
        assert factor == knobs["capacity_factor"]
        assert cost == (pytest.approx(10.0 * int(knobs["micro_batches"]) * (1 + 1e-4 * factor)) if runs else math.inf)
    assert space.knobs["ep_size"] == (2, 4)
    assert space.knobs["micro_batches"] == (1, 2, 4)


def test_most_trials_can_run() -> None:
    """Two thirds of 60 trials can run; without regard to that, most proposals lead where the costs seem least."""
    for seed in range(2):
        trials = list(tune.cubic(SPACE, cost_or_none, 60, seed=seed))
        assert sum(math.isinf(trial.cost) for trial in trials) < 30


SMALL = tune.Space({"a": (1, 2, 4, 8, 16), "b": ("x", "y")})


@pytest.mark.parametrize("able", [0, 1, 2, 7])
def test_what_cannot_run_is_not_printed(able: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The best three are printed, or as many as can run."""

    def judge(number: int) -> float:
        return 20.0 - number if number < able else math.inf

    if able == 0:
        with pytest.raises(InvalidConfig, match=f"got no feasible configuration in {SMALL.size} trials"):
            tune.tune(SMALL, judge, trials=SMALL.size, as_json=True)
        return
    tune.tune(SMALL, judge, trials=SMALL.size, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["space"], found["trials"]) == (SMALL.size, SMALL.size)
    assert [one["number"] for one in found["best"]] == [able - 1, able - 2, able - 3][: min(able, 3)]
    assert all(
        one == {"number": one["number"], "cost": judge(one["number"])} | SMALL.at(one["number"])
        for one in found["best"]
    )
