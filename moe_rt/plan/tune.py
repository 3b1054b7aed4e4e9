"""Search of configurations with a learned predictor: try, learn, propose, as CubicML does, and two baselines.

The predictor is a Gaussian process over the knobs, whose deviation is its uncertainty. Two configurations are alike by
the mean likeness of their knobs, which learns each knob's own effect, and by the product, which learns how they act
together. Another process learns whether a configuration is feasible. `random_search` draws without learning;
`best_predicted` learns once and tries the best predictions (Neural Predictor).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np
from rich.console import Console
from rich.progress import track

from moe_rt.errors import InvalidConfig, expect
from moe_rt.plan.answers import Cluster, Configuration, layer_of
from moe_rt.plan.distinct import Array
from moe_rt.plan.models import Model

Judge = Callable[[int], float]  # number of a configuration -> its cost; infinite if it cannot run
ALIKE_WORDS, LENGTH = 0.3, 0.7  # likeness of different words, and distance of numbers in deviations of their logarithms
NOISE = 0.02  # scatter of a cost, in deviations of the costs
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

    def alike(self) -> Array:
        """Return how alike all configurations are, 0 to 1, [size, size]."""
        chosen = np.unravel_index(np.arange(self.size), [len(values) for values in self.knobs.values()])
        mean, product = np.zeros((self.size, self.size)), np.ones((self.size, self.size))
        for values, at in zip(self.knobs.values(), chosen, strict=True):
            knob = _alike(values)[np.ix_(at, at)]
            mean += knob / len(self.knobs)
            product *= knob
        return (mean + product) / 2


def _alike(values: Sequence[float | str]) -> Array:
    """Return how alike a knob's values are, [values, values]: numbers by the distance of their logarithms."""
    if not all(isinstance(value, (int, float)) for value in values):
        return ALIKE_WORDS + (1 - ALIKE_WORDS) * np.eye(len(values))
    logs = np.log2(np.maximum([float(value) for value in values], 1e-3))
    apart = (logs[:, None] - logs) / max(float(logs.std()), 1e-9) / LENGTH
    return np.asarray(np.exp(-(apart**2) / 2), float)


class Predictor:
    """A Gaussian process that predicts a number of every configuration, with its deviation."""

    def __init__(self, space: Space) -> None:
        self._alike = space.alike()

    def predict(self, tried: Sequence[int], seen: Array) -> tuple[Array, Array]:
        """Learn from what trials showed, [n], and return mean and deviation for every configuration, both [size]."""
        across = self._alike[:, list(tried)]
        known = across[list(tried)] + NOISE**2 * np.eye(len(tried))
        solved = np.linalg.solve(known, across.T)
        middle, scale = float(seen.mean()), max(float(seen.std()), 1e-6)
        left = np.maximum(1 - np.einsum("ij,ji->i", across, solved), 1e-9)
        return solved.T @ (seen - middle) + middle, scale * np.sqrt(left)


@dataclass(frozen=True)
class Trial:
    """One judged configuration."""

    number: int
    cost: float


def cubic(space: Space, judge: Judge, trials: int, seed: int = 0) -> Iterator[Trial]:
    """Yield trials: a few random ones, then each the configuration with the best expected improvement."""
    start = max(LEAST_START, min(MOST_START, space.size // 16))
    rng = np.random.default_rng(seed)
    predictor, tried, costs = Predictor(space), list[int](), list[float]()
    for number in rng.permutation(space.size)[: min(start, trials)].tolist():
        tried.append(number)
        costs.append(judge(number))
        yield Trial(number, costs[-1])
    while len(tried) < min(trials, space.size):
        tried.append(_propose(predictor, tried, np.array(costs), rng))
        costs.append(judge(tried[-1]))
        yield Trial(tried[-1], costs[-1])


def _propose(predictor: Predictor, tried: list[int], costs: Array, rng: np.random.Generator) -> int:
    """Return the untried configuration of the largest expected improvement times its chance to be feasible."""
    runs, chance = np.isfinite(costs), np.ones(1)
    if not runs.all():
        chance = np.clip(predictor.predict(tried, runs.astype(float))[0], 0.02, 1.0)
    if not runs.any():
        return int(rng.choice(np.setdiff1d(np.arange(len(chance)), tried)))
    logs = np.log(costs[runs])
    mean, spread = predictor.predict([n for n, r in zip(tried, runs, strict=True) if r], logs)
    untried = np.setdiff1d(np.arange(len(mean)), tried)
    z = (float(logs.min()) - mean) / spread
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
    predictor, seen = Predictor(space), list[Trial]()
    for number in rng.permutation(space.size)[: max(2, round(share * trials))].tolist():
        seen.append(Trial(number, judge(number)))
        yield seen[-1]
    runs = [trial for trial in seen if math.isfinite(trial.cost)]
    logs = np.log([trial.cost for trial in runs]) if runs else np.zeros(0)
    order = np.argsort(predictor.predict([t.number for t in runs], logs)[0]) if runs else np.arange(0)
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
