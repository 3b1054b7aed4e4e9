"""Search of configurations with a learned predictor: try, learn, propose, as CubicML does, and two baselines.

The predictor is an ensemble of ridge regressions on random Fourier features of the knobs, each fitted to a bootstrap of
the trials; their spread is the uncertainty. A second ensemble learns whether a configuration is feasible.
`random_search` draws without learning; `best_predicted` learns once and tries the best predictions (Neural Predictor).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import click
import numpy as np
from rich.console import Console
from rich.progress import track

from moe_rt.errors import InvalidConfig, expect
from moe_rt.plan.answers import Cluster, Configuration, layer_of
from moe_rt.plan.distinct import Array
from moe_rt.plan.models import Model

Judge = Callable[[int], float]  # number of a configuration -> its cost; infinite if it cannot run
MEMBERS, FEATURES, RIDGE = 12, 32, 0.01
LEAST_START, MOST_START = 4, 8  # random trials before the first prediction


@dataclass(frozen=True)
class Space:
    """Knobs by name with the values of each; a configuration is a number below `size`."""

    knobs: dict[str, tuple[float | str, ...]]

    def __post_init__(self) -> None:
        for name, values in self.knobs.items():
            expect(len(values) > 0, name, "no values", "at least one")

    @property
    def size(self) -> int:
        """Number of configurations."""
        return math.prod(len(values) for values in self.knobs.values())

    def at(self, number: int) -> dict[str, float | str]:
        """Return the knobs of a configuration."""
        chosen = np.unravel_index(number, [len(values) for values in self.knobs.values()])
        return {name: values[int(i)] for (name, values), i in zip(self.knobs.items(), chosen, strict=True)}

    def features(self) -> Array:
        """Return all configurations as vectors, [size, n]: logarithms of numbers, one column for each word."""
        columns = []
        for values in self.knobs.values():
            if all(isinstance(value, (int, float)) for value in values):
                logs = np.log2(np.maximum([float(value) for value in values], 1e-3))
                columns.append(((logs - logs.mean()) / max(float(logs.std()), 1e-9))[:, None])
            else:
                columns.append(1.5 * np.eye(len(values)))
        return np.stack([np.concatenate(row) for row in product(*columns)])


class Predictor:
    """An ensemble that predicts a cost from knobs, with an uncertainty."""

    def __init__(self, features: Array, rng: np.random.Generator) -> None:
        frequency = rng.standard_normal((features.shape[1], FEATURES)) * 0.5
        waves = np.cos(features @ frequency + rng.uniform(0, 2 * math.pi, FEATURES)) * math.sqrt(2 / FEATURES)
        self._seen = np.concatenate([np.ones((len(features), 1)), features, waves], axis=1)
        self._rng = rng

    def predict(self, tried: Sequence[int], costs: Array) -> tuple[Array, Array]:
        """Learn from trials, and return mean and spread of the cost of every configuration, both [size]."""
        known, made = self._seen[list(tried)], []
        for _ in range(MEMBERS):
            weights = self._rng.exponential(size=len(tried))  # a smooth bootstrap
            normal = known.T @ (weights[:, None] * known) + RIDGE * np.eye(known.shape[1])
            made.append(self._seen @ np.linalg.solve(normal, known.T @ (weights * costs)))
        return np.mean(made, axis=0), np.std(made, axis=0) + 1e-6


@dataclass(frozen=True)
class Trial:
    """One judged configuration."""

    number: int
    cost: float


def cubic(space: Space, judge: Judge, trials: int, seed: int = 0) -> Iterator[Trial]:
    """Yield trials: a few random ones, then each the configuration with the best expected improvement."""
    start = max(LEAST_START, min(MOST_START, space.size // 16))
    rng = np.random.default_rng(seed)
    predictor, tried, costs = Predictor(space.features(), rng), list[int](), list[float]()
    for number in rng.permutation(space.size)[: min(start, trials)].tolist():
        tried.append(number)
        costs.append(judge(number))
        yield Trial(number, costs[-1])
    while len(tried) < min(trials, space.size):
        tried.append(_propose(predictor, tried, np.array(costs), space.size))
        costs.append(judge(tried[-1]))
        yield Trial(tried[-1], costs[-1])


def _propose(predictor: Predictor, tried: list[int], costs: Array, size: int) -> int:
    """Return the untried configuration of the largest expected improvement times its chance to be feasible."""
    runs = np.isfinite(costs)
    untried = np.setdiff1d(np.arange(size), tried)
    if not runs.any():
        return int(predictor._rng.choice(untried))
    logs = np.log(np.where(runs, costs, 1.0))
    worst = float(logs[runs].max())
    mean, spread = predictor.predict([n for n, r in zip(tried, runs, strict=True) if r], logs[runs] - worst)
    chance = np.ones(size)
    if not runs.all():
        feasible, _ = predictor.predict(tried, runs.astype(float))
        chance = np.clip(feasible, 0.02, 1.0)
    z = (float(logs[runs].min()) - worst - mean) / spread
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    gain = spread * (z * below + density) * chance
    return int(untried[np.argmax(gain[untried])])


def random_search(space: Space, judge: Judge, trials: int, seed: int = 0) -> Iterator[Trial]:
    """Yield trials in a random order without repetition."""
    for number in np.random.default_rng(seed).permutation(space.size)[:trials].tolist():
        yield Trial(number, judge(number))


def best_predicted(space: Space, judge: Judge, trials: int, seed: int = 0, share: float = 0.5) -> Iterator[Trial]:
    """Yield random trials for a share of the budget, then the best predictions of one fit, in order."""
    rng = np.random.default_rng(seed)
    predictor, seen = Predictor(space.features(), rng), list[Trial]()
    for number in rng.permutation(space.size)[: max(2, round(share * trials))].tolist():
        seen.append(Trial(number, judge(number)))
        yield seen[-1]
    runs = [trial for trial in seen if math.isfinite(trial.cost)]
    logs = np.log([trial.cost for trial in runs]) if runs else np.zeros(0)
    order = np.argsort(predictor.predict([t.number for t in runs], logs - logs.mean())[0]) if runs else np.arange(0)
    left = [int(number) for number in order if number not in {trial.number for trial in seen}]
    for number in left[: trials - len(seen)]:
        yield Trial(number, judge(number))


SEARCHES: dict[str, Callable[..., Iterator[Trial]]] = {
    "cubic": cubic,
    "random": random_search,
    "best_predicted": best_predicted,
}


def trials_to_best(search: Callable[..., Iterator[Trial]], space: Space, costs: Array, seed: int) -> int:
    """Return how many trials a search needs to find the minimum of known costs, [size]."""
    best = float(costs.min())
    for count, trial in enumerate(search(space, lambda number: float(costs[number]), space.size, seed=seed), 1):
        if trial.cost <= best:
            return count
    return space.size


def plan_space(model: Model, cluster: Cluster, tokens: int) -> Space:
    """Return the knobs of a plan: EP size, mode, payload, chunks, micro-batches and capacity."""
    sizes = tuple(n for n in range(2, cluster.gpus + 1) if cluster.gpus % n == 0 and model.experts % n == 0)
    expect(bool(sizes), "gpus", f"{cluster.gpus} for {model.experts} experts", "a number with a common divisor")
    batches = tuple(n for n in (1, 2, 4, 8) if tokens % n == 0)
    return Space(
        {
            "ep_size": sizes,
            "mode": ("low_latency", "normal"),
            "payload": ("fp8", "bf16"),
            "chunks": (1, 2, 4),
            "micro_batches": batches,
            "capacity_factor": (1.1, 1.25, 1.5, 2.0),
        }
    )


def plan_judge(model: Model, cluster: Cluster, tokens: int, shares: Array, space: Space, risk: float = 0.01) -> Judge:
    """Return the cost of a plan's configuration: us of a layer for all tokens; infinite without memory or at risk."""

    def judge(number: int) -> float:
        knobs = space.at(number)
        batches = int(knobs["micro_batches"])
        one = Configuration(
            int(knobs["ep_size"]), str(knobs["mode"]), str(knobs["payload"]), tokens // batches, int(knobs["chunks"])
        )
        try:
            layer = layer_of(model, cluster, one, shares, capacity_factor=float(knobs["capacity_factor"]))
        except InvalidConfig:
            return math.inf
        safe = layer.fits and layer.overflow is not None and layer.overflow.probability <= risk
        return layer.step_us * batches * (1 + 1e-4 * float(knobs["capacity_factor"])) if safe else math.inf

    return judge


def tune(space: Space, judge: Judge, *, trials: int, as_json: bool) -> None:
    """Search a space and print the best configurations that were tried.

    Raises:
        InvalidConfig: no trial found a configuration that runs.
    """
    expect(trials > 0, "trials", trials, "a positive number")
    steps = track(
        cubic(space, judge, trials),
        "tuning",
        total=min(trials, space.size),
        console=Console(stderr=True),
        transient=True,
    )
    tried = sorted(steps, key=lambda trial: trial.cost)
    best = [trial for trial in tried if math.isfinite(trial.cost)][:3]
    if not best:
        raise InvalidConfig(f"tune: got no feasible configuration in {trials} trials, expected one; try more --trials")
    found = [asdict(trial) | space.at(trial.number) for trial in best]
    if as_json:
        return click.echo(json.dumps({"space": space.size, "trials": len(tried), "best": found}))
    for one in found:
        knobs = ", ".join(f"{name} {one[name]}" for name in space.knobs)
        click.echo(f"{one['cost']:.0f} us a layer: {knobs}")
    click.echo(f"{len(tried)} of {space.size} configurations tried")
    return None
