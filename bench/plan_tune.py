"""Count the trials that searches need to find the best configuration of a space that was judged exhaustively.

    python bench/plan_tune.py                       # a plan's knobs, on the simulator
    python bench/plan_tune.py --real COSTS.json     # a layer's knobs on CPU ranks of this machine

Every configuration is measured in three rounds, whose median is its cost. COSTS.json keeps them: a run measures what
is missing, and stops after --seconds. Searches then read the costs. Last it prints one JSON line: the median trials of
each search over ten seeds.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import click
import numpy as np

from moe_rt.info import machine_card
from moe_rt.lab.bench.tune import real_costs, real_space
from moe_rt.plan.answers import Cluster
from moe_rt.plan.distinct import Array
from moe_rt.plan.models import MODELS, Model
from moe_rt.plan.routing import popularity
from moe_rt.plan.tune import SEARCHES, Space, plan_judge, plan_space, trials_to_best

SEEDS, ROUNDS = 10, 3
RANKS, TOKENS = 4, 256
LAYER = Model("a small layer", 512, 256, 16, 4, 1)
GPUS, TOKENS_OF_A_GPU = 64, 2048


def simulated() -> tuple[Space, Array]:
    """Return a plan's knobs and the predicted cost of each configuration."""
    model, cluster = MODELS["deepseek-v3"], Cluster(GPUS)
    space = plan_space(model, cluster, TOKENS_OF_A_GPU)
    judge = plan_judge(model, cluster, TOKENS_OF_A_GPU, popularity(model.experts, 0.1), space)
    return space, np.array([judge(number) for number in range(space.size)])


def measured(path: Path, seconds: float) -> tuple[Space, Array] | None:
    """Return a layer's knobs and the measured cost of each configuration; None if time was too short to measure all."""
    space, ends = real_space(LAYER, RANKS, TOKENS), time.monotonic() + seconds
    fresh = {"machine": machine_card(), "costs": [space.at(n) | {"us": []} for n in range(space.size)]}
    known = json.loads(path.read_text()) if path.exists() else fresh
    groups: dict[tuple[object, object], list[int]] = {}
    for number in range(space.size):
        groups.setdefault((space.at(number)["ep_size"], space.at(number)["heap"]), []).append(number)
    for turn in range(ROUNDS):
        for numbers in groups.values():
            todo = [number for number in numbers if len(known["costs"][number]["us"]) <= turn]
            if not todo:
                continue
            if time.monotonic() > ends:
                return None
            for number, us in real_costs(LAYER, RANKS, TOKENS, space, todo).items():
                known["costs"][number]["us"].append(us)
            path.write_text(json.dumps(known) + "\n")
    return space, np.median([one["us"] for one in known["costs"]], axis=1)


@click.command()
@click.option("--real", type=click.Path(dir_okay=False, path_type=Path), help="Measure, and keep the costs there.")
@click.option("--seconds", default=200.0, show_default=True, help="With --real: time after which nothing is measured.")
def main(real: Path | None, seconds: float) -> None:
    """Judge every configuration, then count each search's trials."""
    judged = measured(real, seconds) if real else simulated()
    if judged is None:
        return click.echo("not all is measured; run it again")
    space, costs = judged
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
    return None


if __name__ == "__main__":
    main()
