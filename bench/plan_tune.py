"""Count the trials that searches need to find the best configuration of a space that was judged exhaustively.

    python bench/plan_tune.py                       # a plan's knobs, on the simulator
    python bench/plan_tune.py --real COSTS.json     # a layer's knobs on CPU ranks of this machine

Real costs are measured once and kept in COSTS.json, so an interrupted run continues. Searches then read them. Last it
prints one JSON line: the median trials of each search over ten seeds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
import numpy as np

from moe_rt.info import machine_card
from moe_rt.lab.bench.tune import real_judge, real_space
from moe_rt.plan.answers import Cluster
from moe_rt.plan.distinct import Array
from moe_rt.plan.models import MODELS, Model
from moe_rt.plan.routing import popularity
from moe_rt.plan.tune import SEARCHES, Space, plan_judge, plan_space, trials_to_best

SEEDS = 10
RANKS, TOKENS = 4, 256
LAYER = Model("a small layer", 512, 256, 16, 4, 1)
GPUS, TOKENS_OF_A_GPU = 64, 2048


def simulated() -> tuple[Space, Array]:
    """Return a plan's knobs and the predicted cost of each configuration."""
    model, cluster = MODELS["deepseek-v3"], Cluster(GPUS)
    space = plan_space(model, cluster, TOKENS_OF_A_GPU)
    judge = plan_judge(model, cluster, TOKENS_OF_A_GPU, popularity(model.experts, 0.1), space)
    return space, np.array([judge(number) for number in range(space.size)])


def measured(path: Path) -> tuple[Space, Array]:
    """Return a layer's knobs and the measured cost of each configuration; measure what the file lacks."""
    space = real_space(LAYER, RANKS, TOKENS)
    judge = real_judge(LAYER, RANKS, TOKENS, space)
    known = json.loads(path.read_text()) if path.exists() else {"machine": machine_card(), "costs": {}}
    costs = known["costs"]
    for number in range(space.size):
        if str(number) not in costs:
            costs[str(number)] = {"us": judge(number)} | space.at(number)
            path.write_text(json.dumps(known, indent=1) + "\n")
            click.echo(f"{number + 1} of {space.size}: {costs[str(number)]}")
    return space, np.array([float(costs[str(number)]["us"]) for number in range(space.size)])


@click.command()
@click.option("--real", type=click.Path(dir_okay=False, path_type=Path), help="Measure, and keep the costs there.")
def main(real: Path | None) -> None:
    """Judge every configuration, then count each search's trials."""
    space, costs = measured(real) if real else simulated()
    trials = {
        name: [trials_to_best(search, space, costs, seed) for seed in range(SEEDS)] for name, search in SEARCHES.items()
    }
    best = int(np.argmin(costs))
    figures = {
        "space": space.size,
        "feasible": int(np.isfinite(costs).sum()),
        "best": space.at(best) | {"us": round(float(costs[best]), 1)},
        "worst_over_best": round(float(costs[np.isfinite(costs)].max() / costs[best]), 2),
        "median_trials": {name: float(np.median(counts)) for name, counts in trials.items()},
    }
    ratio = figures["median_trials"]["cubic"] / figures["median_trials"]["random"]  # type: ignore[index]
    click.echo(json.dumps(figures | {"cubic_over_random": round(ratio, 3) if math.isfinite(ratio) else None}))


if __name__ == "__main__":
    main()
