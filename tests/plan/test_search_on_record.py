"""Searches try the configurations on record, simulated steps take the times on record, and refusals have their words.

After a change on purpose: python tests/plan/test_search_on_record.py
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import assert_on_record, result_of, results_of, write_record

from moe_rt.cli import main
from moe_rt.plan import simulate, tune
from moe_rt.plan.answers import Cluster
from moe_rt.plan.models import MODELS
from moe_rt.plan.routing import popularity

RECORD = Path(__file__).with_suffix(".json")
SPACE = tune.Space({"a": (1, 3, 4, 9, 20), "b": ("x", "y", "z"), "c": (0.0, 1.0, 2.5)})
QWEN = MODELS["qwen3-30b-a3b"]


def cost(number: int) -> float:
    """Return a cost without ties; a fifth cannot run."""
    return math.inf if number % 5 == 3 else 2 + math.sin(1.7 * number) + 0.01 * number


def searched(name: str) -> Any:
    """Return what each search tries, with budgets below and beyond the space."""
    search = tune.SEARCHES[name]
    costs = np.array([cost(number) for number in range(SPACE.size)])
    return {
        "trials": [
            [(one.number, one.cost) for one in search(SPACE, judge, most, seed=seed)]
            for judge in (cost, math.exp)
            for most, seed in ((3, 0), (16, 1), (14, 2), (60, 3))
        ],
        "to best": [tune.trials_to_best(search, SPACE, costs, seed) for seed in range(4)],
        "never": tune.trials_to_best(search, SPACE, np.array([math.nan, *costs[1:]]), 0),
    }


def predictor() -> Any:
    made, seen = tune.Predictor(SPACE), np.array([1.0, 2.5, 0.5, 3.0])
    small = tune.Space({"a": (2, 2), "b": (0.0, 1e-3, 1.0)})
    return {
        "alike": [SPACE.alike()[7], small.alike()],
        "at": [SPACE.at(number) for number in (0, 1, 3, 17, 44)],
        "predicted": made.predict([0, 4, 20, 44], seen),
        "equal": made.predict([3, 9], np.ones(2)),
        "refused": [result_of(partial(tune.Space, {"a": (1,), "b": ()}))],
    }


def judged() -> Any:
    """Return the knobs of a plan and costs of its configurations."""
    found = {}
    for name, cluster, tokens, sigma in (("even", Cluster(16), 64, 0.0), ("uneven", Cluster(8, "H200"), 12, 0.6)):
        space = tune.plan_space(QWEN, cluster, tokens)
        judge = tune.plan_judge(QWEN, cluster, tokens, popularity(QWEN.experts, sigma), space)
        found[name] = [space.knobs, space.size, [judge(number) for number in range(0, space.size, 23)]]
    return found, [result_of(partial(tune.plan_space, QWEN, cluster, 3)) for cluster in (Cluster(3), Cluster(6))]


def printed(*words: str) -> Any:
    command = ("plan", "--model", "qwen3-30b-a3b", "--tokens", "64", "--tune", *words)
    lines = CliRunner().invoke(main, command).output.splitlines()
    return [json.loads(line) if line.startswith("{") else line for line in lines]


def stepped() -> Any:
    """Return steps of even and uneven traffic, in domains that divide the ranks and that do not."""
    rng, found = np.random.default_rng(4), []
    for ranks, domain in ((1, None), (3, None), (4, 2), (5, 2), (6, 3), (4, 1)):
        traffic = rng.integers(0, 4, (ranks, ranks)) * 1e5
        for ports in (simulate.Ports(300, 45), simulate.Ports(200, 400, 0, 0, 0.2, 0.5, 3.0)):
            arrives = None if ports.noise else np.arange(ranks) * 2.5
            draws = np.random.default_rng(1) if ports.noise else None
            step = simulate.exchange(traffic, ports, domain=domain, arrives=arrives, rng=draws)
            found.append([step, step.us, simulate.closed_form_us(traffic, ports, domain)])
    near = simulate.Ports(100)
    found.append([simulate.exchange(np.ones((2, 2)) * 1e6, near).us, simulate.closed_form_us(np.ones((2, 2)), near)])
    return found


def slowest() -> Any:
    given = ((1, 2.0), (2, 2.0), (3, 2.0), (64, 2.0), (5, 0.0), (0, 1.0), (3, -1.0))
    found = [result_of(partial(simulate.slowest_of, 10.0, deviation, groups)) for groups, deviation in given]
    return [*found, result_of(partial(simulate.slowest_of, -1.0, 1.0, 2)), simulate.slowest_of(0.0, 1.0, 4)]


def refused() -> Any:
    fields = ("link_gbs", "net_gbs", "start_us", "signal_us", "noise", "straggler", "slower")
    ports = [
        result_of(partial(simulate.Ports, **({"link_gbs": 1.0} | {field: value})))
        for field in fields
        for value in (-1.0, 0.0, 1.0, 1.5)
    ]
    traffic = (np.ones(3), np.ones((2, 3)), -np.ones((2, 2)), np.zeros((2, 2)), np.ones((2, 2)))
    steps = [result_of(partial(simulate.exchange, each, simulate.Ports(1), domain=1)) for each in traffic]
    return ports, steps


def traced() -> Any:
    step = simulate.exchange(np.array([[0, 1e5], [3e5, 0]]), simulate.Ports(100), arrives=np.array([0.0, 4.0]))
    with tempfile.TemporaryDirectory() as folder:
        simulate.write_trace(step, Path(folder) / "trace.json")
        return json.loads((Path(folder) / "trace.json").read_text())


RESULTS = {
    **{f"searched {name}": partial(searched, name) for name in tune.SEARCHES},
    **{make.__name__: make for make in (predictor, judged, stepped, slowest, refused, traced)},
    "printed": partial(printed, "--gpus", "4", "--trials", "12"),
    "printed json": partial(printed, "--gpus", "4", "--trials", "9", "--json", "--sigma", "0.2"),
    "printed nothing": partial(printed, "--gpus", "4", "--trials", "0"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_trials_and_times_are_those_on_record(name: str) -> None:
    assert_on_record(RECORD, name, result_of(RESULTS[name]))


if __name__ == "__main__":
    write_record(RECORD, results_of(RESULTS))
