"""Questions that users ask before they rent a cluster, by name, answered from the same predictions as plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_rt.errors import InvalidConfig, expect
from moe_rt.plan.answers import Cluster, Configuration, Layer, layer_of
from moe_rt.plan.distinct import Array
from moe_rt.plan.models import Model
from moe_rt.plan.routing import factor_for, popularity, rank_loads

BATCHES = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
PLAN_US = 60.0  # time that a plan of balanced experts takes on GPUs, as libraries that make one publish


@dataclass(frozen=True)
class Setting:
    """The subject of a question: a model on a cluster, tokens of each GPU, and the unevenness of its routing."""

    model: Model
    cluster: Cluster
    tokens: int
    sigma: float = 1.0

    @property
    def shares(self) -> Array:
        """Shares of the experts."""
        return popularity(self.model.experts, self.sigma)

    def layer(self, ep_size: int, *, tokens: int | None = None, even: bool = False, **changes: object) -> Layer:
        """Predict the better mode of a layer, with even routing if asked."""
        shares = popularity(self.model.experts) if even else self.shares
        cluster = replace(self.cluster, gpus=max(self.cluster.gpus, ep_size))
        chosen, refusal = [], InvalidConfig("mode: got none, expected one")
        for mode in cluster.modes:
            one = Configuration(ep_size, mode, cluster.payloads[0], tokens or self.tokens)
            try:
                chosen.append(layer_of(self.model, cluster, replace(one, **changes), shares))  # type: ignore[arg-type]
            except InvalidConfig as error:  # a batch outside one mode's range may be within the other's
                refusal = error
        if not chosen:
            raise refusal
        return min(chosen, key=lambda layer: layer.step_us)


@dataclass(frozen=True)
class Answer:
    """An answer in one sentence, and its figures."""

    text: str
    columns: tuple[str, ...]
    rows: list[tuple[float | str, ...]]


def balance(asked: Setting) -> Answer:
    """Find the batch from which balancing experts pays."""
    rows: list[tuple[float | str, ...]] = []
    for tokens in BATCHES:
        skewed, even = (asked.layer(_ep(asked), tokens=tokens, even=even).step_us for even in (False, True))
        moved = even + PLAN_US
        rows.append((tokens, round(skewed, 1), round(moved, 1), "balance" if moved < skewed else "do not"))
    pays = next((row[0] for row in rows if row[3] == "balance"), None)
    text = f"balancing pays from {pays} tokens a GPU" if pays else f"balancing does not pay up to {BATCHES[-1]} tokens"
    return Answer(f"{text} (sigma {asked.sigma:g})", ("tokens", "uneven us", "balanced us", "choose"), rows)


def chunks(asked: Setting) -> Answer:
    """Find the batch from which two batches or chunks pay."""
    rows: list[tuple[float | str, ...]] = []
    for tokens in BATCHES[1:]:
        whole, halves = (asked.layer(_ep(asked), tokens=tokens, chunks=n).step_us for n in (1, 2))
        rows.append((tokens, round(whole, 1), round(halves, 1), "2" if halves < whole else "1"))
    pays = next((row[0] for row in rows if row[3] == "2"), None)
    text = f"two chunks pay from {pays} tokens a GPU" if pays else f"two chunks never pay up to {BATCHES[-1]} tokens"
    return Answer(text, ("tokens", "whole us", "two chunks us", "choose"), rows)


def bound(asked: Setting) -> Answer:
    """Compute the memory that a bound on imbalance costs."""
    model, ep_size = asked.model, _ep(asked)
    loads = rank_loads(asked.tokens, model.topk, ep_size, asked.shares)
    even, row = float(loads.mean.mean()), 2 * model.hidden
    rows: list[tuple[float | str, ...]] = []
    for risk in (0.1, 0.01, 1e-4, 1e-6):
        factor = factor_for(risk, asked.tokens, model.topk, ep_size, asked.shares)
        rows.append((risk, factor, round(factor * even * row / 1e9, 4)))
    worst = ep_size * asked.tokens * min(model.topk, model.experts // ep_size) * row / 1e9
    rows.append(("never", round(worst * 1e9 / even / row, 2), round(worst, 4)))
    text = f"one overflow in 10,000 steps needs factor {rows[2][1]} and {rows[2][2]} GB; the worst case {worst:.3g} GB"
    return Answer(text, ("risk a step", "capacity_factor", "GB of received rows"), rows)


def ep(asked: Setting) -> Answer:
    """Compare EP 8 and 16."""
    return _between(asked, "EP", {str(size): asked.layer(size) for size in _sizes(asked, 8, 16)})


def payload(asked: Setting) -> Answer:
    """Compare fp8 and bf16 as the payload."""
    made = {name: asked.layer(_ep(asked), payload=name) for name in ("fp8", "bf16")}
    return _between(asked, "payload", made)


def nodes(asked: Setting) -> Answer:
    """Compare one node and two."""
    domain = asked.cluster.domain
    made = {str(size // domain): asked.layer(size) for size in _sizes(asked, domain, 2 * domain)}
    return _between(asked, "nodes", made)


QUESTIONS: dict[str, Callable[[Setting], Answer]] = {
    question.__name__: question for question in (balance, chunks, bound, ep, payload, nodes)
}


def _ep(asked: Setting) -> int:
    """Return the largest EP size that the GPUs and experts allow."""
    most = asked.cluster.gpus
    fitting = [n for n in range(2, most + 1) if most % n == 0 and asked.model.experts % n == 0]
    expect(bool(fitting), "gpus", f"{most} for {asked.model.experts} experts", "a number with a common divisor")
    return fitting[-1]


def _sizes(asked: Setting, *sizes: int) -> list[int]:
    experts = asked.model.experts
    fits = all(experts % size == 0 for size in sizes)
    expect(fits, "experts", experts, f"a multiple of {' and '.join(map(str, sizes))}, the sizes to compare")
    return list(sizes)


def _between(asked: Setting, what: str, made: dict[str, Layer]) -> Answer:
    rows: list[tuple[float | str, ...]] = [
        (name, round(one.dispatch.us, 1), round(one.experts_us, 1), round(one.combine.us, 1), round(one.step_us, 1),
         round(one.memory_bytes / 1e9, 2))
        for name, one in made.items()
    ]  # fmt: skip
    best = min(made, key=lambda name: made[name].step_us)
    other = max(made.values(), key=lambda one: one.step_us)
    gain = other.step_us / made[best].step_us - 1
    text = f"{what} {best} is faster by {gain:.0%} at {asked.tokens} tokens a GPU; limited by {made[best].limits}"
    return Answer(text, (what, "dispatch us", "experts us", "combine us", "step us", "GB a GPU"), rows)
