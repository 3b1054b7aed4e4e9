"""Statistics of routing: how uneven experts and ranks are, and how likely a capacity overflows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moe_rt.errors import expect
from moe_rt.plan.distinct import Array, owners
from moe_rt.routes.file import ids_of

if TYPE_CHECKING:
    from moe_rt.config.spec import BufferSpec

Ids = npt.NDArray[np.int64]
_NORMAL = NormalDist()
_MOST_ADVISED = 64  # ranks: the laws of more take seconds
RARE = 0.02  # risks below it are sums of tails: two ranks hardly overflow together


def popularity(experts: int, sigma: float = 0.0, seed: int = 0) -> Array:
    """Return the share of each expert, [experts], log-normal with the given sigma; 0 is uniform.

    The shares are the quantiles of the distribution in a random order, so the unevenness does not depend on the seed.

    Raises:
        InvalidConfig: experts is not positive, or sigma is negative or not finite.
    """
    expect(experts > 0, "experts", experts, "a positive number")
    expect(math.isfinite(sigma) and sigma >= 0, "sigma", sigma, "a finite number >= 0")
    quantiles = [_NORMAL.inv_cdf((i + 0.5) / experts) for i in range(experts)]
    weights = np.random.default_rng(seed).permutation(np.exp(sigma * np.array(quantiles)))
    return np.asarray(weights / weights.sum(), float)


def draw(rng: np.random.Generator, tokens: int, topk: int, shares: Array) -> Ids:
    """Draw distinct experts for each token with chances by `shares`, int64 [tokens, topk]."""
    popular = int(np.count_nonzero(shares))
    expect(0 < topk <= popular, "topk", topk, f"1 to {popular}, the experts with a share")
    with np.errstate(divide="ignore"):
        clocks = rng.standard_exponential((tokens, len(shares)), dtype=np.float32) / shares.astype(np.float32)
    return np.argpartition(clocks, topk - 1, axis=1)[:, :topk].astype(np.int64)


@dataclass(frozen=True)
class Unevenness:
    """Unevenness of loads as people quote it.

    Attributes:
        max_over_mean: the busiest load relative to the mean.
        max_vio: the same minus 1, as in the literature on balancing without a loss.
    """

    max_over_mean: float
    max_vio: float
    cv: float


def unevenness(loads: Sequence[float] | Array) -> Unevenness:
    """Return the unevenness of loads of experts or ranks.

    Raises:
        InvalidConfig: the list is empty, a load is negative, or all are zero.
    """
    values = np.asarray(loads, float)
    fits = values.size > 0 and bool((values >= 0).all()) and values.sum() > 0
    expect(fits, "loads", values.tolist()[:4], "numbers >= 0 with a positive sum")
    ratio = float(values.max() / values.mean())
    return Unevenness(ratio, ratio - 1, float(values.std() / values.mean()))


def inclusion(shares: Array, topk: int) -> Array:
    """Return the chance that each expert is among a token's topk distinct ones, [experts].

    Drawing without replacement by share is a race of exponential clocks with rates shares[e]: expert e is in if fewer
    than topk other clocks rang before its own. The integral over its own time is exact up to rounding.
    """
    expect(0 < topk <= len(shares), "topk", topk, f"1 to experts = {len(shares)}")
    return _inclusion(np.asarray(shares, float).tobytes(), topk).copy()


@lru_cache(64)
def _inclusion(shares_bytes: bytes, topk: int) -> Array:
    shares = np.frombuffer(shares_bytes)
    if topk == len(shares):
        return np.ones(len(shares))
    rate, log_t = np.maximum(shares, 1e-12), _log_times(shares, 400)
    rung = _rung(shares, 400)
    before, after = _counts_before(rung, topk), _counts_before(rung[::-1], topk)[::-1]
    fewer = np.zeros_like(rung)
    for i in range(topk):  # the others: i among those before e, and at most topk - 1 - i among those after
        fewer += before[:, i] * after[:, : topk - i].sum(1)
    density = rate[:, None] * np.exp(log_t) * (1 - rung) * fewer
    chance = density.sum(1) * (log_t[1] - log_t[0])
    return np.asarray(chance * topk / chance.sum(), float)


def _log_times(shares: Array, steps: int) -> Array:
    rate = np.maximum(shares, 1e-12)
    return np.linspace(math.log(1e-5 / rate.max()), math.log(60 / rate.min()), steps)


def _rung(shares: Array, steps: int) -> Array:
    """Return the chance that each expert's clock has rung by a time, [experts, steps]."""
    rate = np.maximum(shares, 1e-12)
    return np.asarray(-np.expm1(-rate[:, None] * np.exp(_log_times(shares, steps))), float)


def _counts_before(rung: Array, most: int) -> Array:
    """Return the chance that exactly i of the experts listed before e have rung, [experts, most, times], i < most."""
    counts = np.zeros((len(rung), most, rung.shape[1]))
    counts[0, 0] = 1
    for e in range(1, len(rung)):
        counts[e] = counts[e - 1] * (1 - rung[e - 1])
        counts[e, 1:] += counts[e - 1, :-1] * rung[e - 1]
    return counts


@dataclass(frozen=True)
class Overflow:
    """Risk of a capacity in one dispatch.

    Attributes:
        probability: chance that at least one rank receives more rows than its capacity.
        low, high: the interval that holds it with 95 % (simulation), or the formula's bounds.
        rows: capacity of a rank.
    """

    probability: float
    low: float
    high: float
    rows: int


def capacity_rows(factor: float, tokens: int, topk: int, experts: int, ranks: int, rank: int = 0) -> int:
    """Return the rows that a capacity factor gives a rank, as `moe_rt.Buffer` computes them without alignment."""
    expect(math.isfinite(factor) and factor > 0, "capacity_factor", factor, "a finite number > 0")
    local = int((owners(experts, ranks) == rank).sum())
    worst = ranks * tokens * min(topk, local)
    return min(worst, max(1, math.ceil(factor * (ranks * tokens * topk * local / experts))))


def overflow(factor: float, tokens: int, topk: int, ranks: int, shares: Array, most_draws: int = 100_000) -> Overflow:
    """Return the probability that a capacity factor overflows, from the moments of the ranks' loads.

    The rows of a rank are a sum over R*T independent tokens. Ranks share exactly K choices a token, so their loads are
    negatively correlated. Small risks are the sum of the ranks' tails; others come from draws of correlated normals
    whose marginal risks are those of the ranks, and the interval states the draws' uncertainty.

    Raises:
        InvalidConfig: a number makes no sense.
    """
    loads = rank_loads(tokens, topk, ranks, shares)
    rows, tails = _tails(loads, factor, tokens, topk, ranks, len(shares))
    if (total := float(tails.sum())) < RARE:
        return Overflow(total, float(tails.max()), total, int(rows.min()))
    most = np.array([_NORMAL.inv_cdf(min(max(1 - tail, 1e-12), 1 - 1e-12)) for tail in tails])
    draws = min(most_draws, 8_000_000 // ranks)
    normal = np.random.default_rng(0).standard_normal((draws, ranks)) @ loads.mixing
    low, high = wilson(hits := int((normal > most).any(axis=1).sum()), draws)
    return Overflow(hits / draws, low, high, int(rows.min()))


def _tails(loads: Loads, factor: float, tokens: int, topk: int, ranks: int, experts: int) -> tuple[Array, Array]:
    """Return each rank's rows by a capacity factor, and the chance that it receives more, both [ranks]."""
    rows = np.array([capacity_rows(factor, tokens, topk, experts, ranks, r) for r in range(ranks)])
    worst = np.array([ranks * tokens * min(topk, int(n)) for n in np.bincount(owners(experts, ranks))])
    return rows, np.where(rows >= worst, 0.0, loads.tails(rows))


@dataclass(frozen=True)
class Loads:
    """Rows that each rank receives in one dispatch: a sum over tokens that are independent of each other.

    Attributes:
        tokens: tokens of all ranks.
        laws: chance that a token has k of its experts on a rank, [ranks, K + 1].
        mean, deviation, skewness: moments of the sums, each [ranks].
        mixing: turns independent standard normals [n, ranks] into correlated ones.
    """

    tokens: int
    laws: Array
    mean: Array
    deviation: Array
    skewness: Array
    mixing: Array

    def tails(self, rows: Array) -> Array:
        """Return the chance that each rank receives more than `rows`, [ranks]."""
        return np.array([self._tail(r, int(most)) for r, most in enumerate(rows)])

    def _tail(self, rank: int, rows: int) -> float:
        """Return P(X > rows) by the characteristic function, on a window in which all but 1e-30 of the law is."""
        middle, reach = round(float(self.mean[rank])), 14 * float(self.deviation[rank]) + 14
        if abs(rows - middle) > reach:
            return float(rows < middle)
        size = 1 << math.ceil(math.log2(2 * reach + 2))
        law = np.fft.ifft(np.fft.fft(self.laws[rank], size) ** self.tokens).real
        above = np.arange(rows + 1, middle + size // 2)
        return min(1.0, max(0.0, float(law[above % size].sum())))

    def quantile(self, probability: float) -> Array:
        """Return a quantile of each rank's rows."""
        z = _NORMAL.inv_cdf(probability)
        return np.asarray(self.mean + self.deviation * (z + self.skewness / 6 * (z * z - 1)), float)


def rank_loads(tokens: int, topk: int, ranks: int, shares: Array) -> Loads:
    """Return the law of the rows that each rank receives in one dispatch of T tokens on each of R ranks.

    The law of each rank is exact; correlations are those of nearly independent choices held to K per token (Hajek).
    """
    for name, value in (("tokens", tokens), ("ranks", ranks)):
        expect(value > 0, name, value, "a positive number")
    experts = len(shares)
    expect(experts >= ranks, "experts", experts, f"at least one for each of {ranks} ranks")
    chance, owner = inclusion(shares, topk), owners(experts, ranks)
    own, all_tokens = np.bincount(owner, chance * (1 - chance), ranks), ranks * tokens
    covariance = np.diag(own) - np.outer(own, own) / max(float(own.sum()), 1e-12)
    spread = np.sqrt(np.maximum(np.diag(covariance), 1e-15))
    values, vectors = np.linalg.eigh(covariance / np.outer(spread, spread))
    laws = _token_laws(np.asarray(shares, float).tobytes(), topk, ranks)
    held = np.arange(topk + 1)
    mean = laws @ held
    central = held - mean[:, None]
    variance = np.maximum((laws * central**2).sum(1), 1e-15)
    return Loads(
        tokens=all_tokens,
        laws=laws,
        mean=np.asarray(all_tokens * mean, float),
        deviation=np.sqrt(all_tokens * variance),
        skewness=np.asarray((laws * central**3).sum(1) / variance**1.5 / math.sqrt(all_tokens), float),
        mixing=(vectors * np.sqrt(np.maximum(values, 0))).T,
    )


@lru_cache(64)
def _token_laws(shares_bytes: bytes, topk: int, ranks: int) -> Array:
    """Return the chance that k of a token's distinct experts are on a rank, [ranks, K + 1].

    In the race of clocks, let A of the rank's experts and B of the others have rung at a time. They are independent and
    only grow, so the K-th ring leaves A = k at the rate of A's step to k while B = K - k, or of B's step to K - k while
    A = k. The integral over that time is a sum over 800 steps.
    """
    rung = _rung(np.frombuffer(shares_bytes), 800)
    owner = owners(len(rung), ranks)
    none = np.zeros((topk + 1, rung.shape[1]))
    none[0] = 1
    own = [none] * ranks
    for expert, rank in enumerate(owner):
        own[rank] = _together(own[rank], np.stack([1 - rung[expert], rung[expert]]))
    before = list(accumulate(own[:-1], _together, initial=none))
    after = list(accumulate(own[:0:-1], _together, initial=none))[::-1]
    laws = np.zeros((ranks, topk + 1))
    for rank in range(ranks):
        here, there = own[rank], _together(before[rank], after[rank])[::-1]  # there[k] is P(B = K - k)
        steps = (_steps_to(here), _steps_to(there[::-1])[::-1])
        middles = ((here[:, 1:] + here[:, :-1]) / 2, (there[:, 1:] + there[:, :-1]) / 2)
        laws[rank] = (steps[0] * middles[1]).sum(1) + (steps[1] * middles[0]).sum(1)
    return np.asarray(laws / laws.sum(1, keepdims=True), float)


def _together(first: Array, second: Array) -> Array:
    """Return the law of the sum of two independent counts, up to the first one's most, [most + 1, times]."""
    total = np.zeros_like(first)
    for count, chance in enumerate(second):
        total[count:] += first[: len(first) - count] * chance
    return total


def _steps_to(law: Array) -> Array:
    """Return the chance that a growing count steps to each value between two times, [most + 1, times - 1]."""
    at_least = 1 - np.concatenate([np.zeros((1, law.shape[1])), np.cumsum(law[:-1], axis=0)])
    return np.asarray(np.diff(at_least, axis=1), float)


def simulate_overflow(
    factor: float, tokens: int, topk: int, ranks: int, shares: Array, batches: int = 10_000, seed: int = 0
) -> Overflow:
    """Return the share of simulated dispatches in which a rank overflows, with Wilson's 95 % interval."""
    rng, owner = np.random.default_rng(seed), owners(len(shares), ranks)
    rows = np.array([capacity_rows(factor, tokens, topk, len(shares), ranks, r) for r in range(ranks)])
    over = sum(bool((loads > rows).any()) for loads in simulate_loads(rng, tokens, topk, ranks, shares, owner, batches))
    low, high = wilson(over, batches)
    return Overflow(over / batches, low, high, int(rows.min()))


def simulate_loads(
    rng: np.random.Generator, tokens: int, topk: int, ranks: int, shares: Array, owner: Ids, batches: int
) -> Array:
    """Draw the rows that ranks receive in many dispatches, [batches, ranks]."""
    all_tokens, step = ranks * tokens, max(1, 2_000_000 // (ranks * tokens * len(shares)))
    parts = []
    for first in range(0, batches, step):
        now = min(step, batches - first)
        chosen = owner[draw(rng, now * all_tokens, topk, shares)].reshape(now, -1)
        offset = chosen + ranks * np.arange(now)[:, None]
        parts.append(np.bincount(offset.reshape(-1), minlength=now * ranks).reshape(now, ranks))
    return np.concatenate(parts).astype(float)


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval for a probability of which `hits` of `trials` were seen."""
    share, extra = hits / trials, z * z / trials
    middle = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(share * (1 - share) / trials + extra / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def factor_for(probability: float, tokens: int, topk: int, ranks: int, shares: Array) -> float:
    """Return the smallest capacity factor, to 0.001, that overflows with at most this probability per dispatch.

    Raises:
        InvalidConfig: the probability is not between 0 and 1.
    """
    expect(0 < probability < 1, "probability", probability, "a number between 0 and 1")
    if probability < RARE:  # the sum of the tails, without draws
        loads = rank_loads(tokens, topk, ranks, shares)

    def fits(factor: float) -> bool:
        if probability >= RARE:
            return overflow(factor, tokens, topk, ranks, shares).probability <= probability
        return float(_tails(loads, factor, tokens, topk, ranks, len(shares))[1].sum()) <= probability

    low, high = 0.0, 1.0
    while not fits(high) and high < len(shares):
        high *= 2
    while high - low > 0.0005:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return math.ceil(high * 1000) / 1000


def capacity_advice(factor: float, tokens: int, topk: int, ranks: int, shares: Array, risk: float = 1e-4) -> str:
    """Return the risk of a capacity factor in words, and the factor for a small risk."""
    now = overflow(factor, tokens, topk, ranks, shares, most_draws=10_000).probability
    enough = factor_for(risk, tokens, topk, ranks, shares)
    often = f"{now:.2g}" if now >= 1e-6 else "below 1e-6"
    return f"factor {factor:g} overflows with probability {often} a step; {enough:.3g} for one in {round(1 / risk):,}"


def advice_of(spec: BufferSpec, topk_idx: Ids) -> str:
    """Return the capacity advice for a buffer whose routing is as that of one rank, or "" where no formula holds.

    Args:
        topk_idx: int64 [T, K]; each expert counts one choice more, so that few tokens do not exclude one.
    """
    held = np.bincount(np.array(spec.placement.ranks), minlength=spec.num_ranks)
    even = np.bincount(owners(spec.num_experts, spec.num_ranks))
    if spec.capacity_factor is None or spec.by_token or topk_idx.size == 0:
        return ""
    if spec.num_ranks > _MOST_ADVISED or (held != even).any():
        return ""
    counts = 1.0 + np.bincount(topk_idx[topk_idx >= 0].reshape(-1), minlength=spec.num_experts)
    shares = counts[np.argsort(np.array(spec.placement.ranks), kind="stable")] / counts.sum()
    sizes = (spec.num_max_tokens_per_rank, spec.num_topk, spec.num_ranks)
    return f"with routing as on this rank, {capacity_advice(spec.capacity_factor, *sizes, shares)}"


def load_trace(path: Path, experts: int | None = None) -> Ids:
    """Return recorded experts, int64 [tokens, layers, K]; see `moe_rt.routes.load`.

    Raises:
        InvalidConfig: the file holds no routes, or an expert outside [-1, experts).
    """
    return ids_of(path, experts)


def shares_of(topk_idx: Ids, experts: int) -> Array:
    """Return the share of each expert in routing of any shape, [experts]."""
    counts = np.bincount(topk_idx[topk_idx >= 0].reshape(-1), minlength=experts).astype(float)
    expect(counts.sum() > 0, "topk_idx", "no expert", "at least one choice")
    return np.asarray(counts / counts.sum(), float)
