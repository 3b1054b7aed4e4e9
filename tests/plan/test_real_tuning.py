"""Real tuning judges configurations of equal work by the benchmark, and refuses what cannot run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moe_rt.cli import main
from moe_rt.errors import InvalidConfig
from moe_rt.lab.bench import tune
from moe_rt.lab.bench.contestants import find
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.plan.models import Model

MODEL = Model("tiny", 8, 4, 4, 2, 1)


def test_the_command_runs_the_benchmark(tmp_path: Path) -> None:
    config = dict(hidden_size=8, moe_intermediate_size=4, num_experts=4, num_experts_per_tok=2, num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--model", str(tmp_path / "config.json"), "--gpus", "1", "--tokens", "3", "--real", "--trials", "2")
    done = CliRunner().invoke(main, ["plan", *words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["space"], found["trials"], len(found["best"])) == (4, 2, 2)
    assert found["best"][0]["cost"] <= found["best"][1]["cost"] < math.inf


def test_every_configuration_does_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Any] = []

    def run(given: list[Any], settings: Any, *rest: Any) -> dict[str, Any]:
        (case,) = given
        cases.append((case, settings.contestants[0]))
        if case.ranks == 4:
            raise RankFailed("no memory")
        name = find(settings.contestants[0]).name
        return {"runs": [{"results": [{"contestant": name, "isolated_us": {"p50": 10.0}}]}]}

    monkeypatch.setattr(tune, "run", run)
    space = tune.real_space(MODEL, 4, 16)
    judge = tune.real_judge(MODEL, 4, 16, space)
    costs = [judge(number) for number in range(space.size)]
    assert space.size == 3 * 2 * 2 * 4
    for (case, contestant), cost, number in zip(cases, costs, range(space.size), strict=True):
        knobs = space.at(number)
        assert case.ranks * case.tokens * int(knobs["micro_batches"]) == 4 * 16
        assert find(contestant) is tune.CONTESTANTS[int(knobs["num_threads"])]
        assert cost == (math.inf if case.ranks == 4 else 10.0 * float(knobs["micro_batches"]))


def test_ranks_are_started_once_for_what_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cases: list[Any], settings: Any, *rest: Any) -> dict[str, Any]:
        results = [
            [{"contestant": find(name).name, "isolated_us": {"p50": float(case.tokens + at)}}
             for at, name in enumerate(settings.contestants)]
            for case in cases
        ]  # fmt: skip
        return {"runs": [{"results": one} for one in results]}

    monkeypatch.setattr(tune, "run", run)
    space = tune.real_space(MODEL, 4, 16)
    same = [n for n in range(space.size) if (space.at(n)["ep_size"], space.at(n)["heap"]) == (2, "shm")]
    for number, cost in tune.real_costs(MODEL, 4, 16, space, same).items():
        knobs = space.at(number)
        batches, threads = int(knobs["micro_batches"]), int(knobs["num_threads"])
        assert cost == (32 // batches + threads - 1) * batches
    with pytest.raises(InvalidConfig, match="numbers: got 6 kinds of ranks, expected configurations that the same"):
        tune.real_costs(MODEL, 4, 16, space, range(space.size))


def test_a_cluster_is_no_machine() -> None:
    with pytest.raises(InvalidConfig, match="gpus: got 64, expected 1 to 8 ranks of this machine"):
        tune.real_space(MODEL, 64, 16)
