"""Mean numbers of distinct ranks, nodes or groups that a token visits, for routing that a formula describes."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from moe_rt.errors import expect

Array = npt.NDArray[np.float64]
GROUP_TRIALS, GROUP_SEED = 40_000, 11


@lru_cache(4096)
def distinct(units: int, experts: int, topk: int) -> float:
    """Return the mean number of distinct units that hold a token's experts, drawn uniformly without repetition.

    Experts are spread as evenly as whole numbers allow, so `experts` need not divide by `units`.

    Raises:
        InvalidConfig: a number is not positive, topk exceeds experts, or a unit would have no expert.
    """
    check_shape(units, experts, topk)
    each, more = divmod(experts, units)
    larger = more * hit(each + 1, experts, topk) if more else 0.0
    return (units - more) * hit(each, experts, topk) + larger


def hit(held: int, experts: int, topk: int) -> float:
    """Return the probability that at least one of topk distinct experts is among the `held` of one unit."""
    return 1 - math.comb(experts - held, topk) / math.comb(experts, topk)


def distinct_balanced(units: int, topk: int) -> int:
    """Return the number of distinct units under round-robin routing, which spreads a token as widely as it can."""
    return min(units, topk)


@lru_cache(512)
def distinct_limited(units: int, experts: int, topk: int, groups: int, kept: int, best: int = 1) -> float:
    """Return the mean number of distinct units if only the best `kept` of `groups` expert groups may be chosen.

    A group's score is the sum of its `best` highest expert scores (1 is the maximum, 2 is DeepSeek-V3's rule). Scores
    are independent and uniform. The maximum favours groups that hold top experts, so no hypergeometric formula holds:
    the mean comes from a simulation of 40,000 tokens with a fixed seed (standard error below 0.005).

    Raises:
        InvalidConfig: experts do not divide into the groups, or kept groups hold fewer experts than topk.
    """
    check_shape(units, experts, topk)
    expect(groups > 0 and experts % groups == 0, "groups", groups, f"a divisor of experts = {experts}")
    expect(0 < kept <= groups, "topk_groups", kept, f"1 to groups = {groups}")
    expect(kept * (experts // groups) >= topk, "topk", topk, f"at most {kept * (experts // groups)}, kept experts")
    if kept == groups:
        return distinct(units, experts, topk)
    chosen = _limited_sample(experts, topk, groups, kept, best)
    return float(count_distinct(owners(experts, units)[chosen], units).mean())


@lru_cache(8)
def _limited_sample(experts: int, topk: int, groups: int, kept: int, best: int) -> npt.NDArray[np.int64]:
    return limited_topk(np.random.default_rng(GROUP_SEED), GROUP_TRIALS, experts, topk, groups, kept, best)


def limited_topk(
    rng: np.random.Generator, tokens: int, experts: int, topk: int, groups: int, kept: int, best: int = 1
) -> npt.NDArray[np.int64]:
    """Draw group-limited routing of `tokens` tokens, int64 [tokens, topk]."""
    scores = rng.random((tokens, groups, experts // groups))
    of_group = np.sort(scores, axis=2)[:, :, -best:].sum(2)
    out = np.argsort(of_group, axis=1)[:, : groups - kept]
    np.put_along_axis(scores, out[:, :, None], -1.0, axis=1)
    return np.argpartition(scores.reshape(tokens, experts), -topk, axis=1)[:, -topk:].astype(np.int64)


def owners(experts: int, units: int) -> npt.NDArray[np.int64]:
    """Return the unit of each expert in contiguous blocks, the first experts % units one larger; int64 [experts]."""
    each, more = divmod(experts, units)
    return np.repeat(np.arange(units), [each + (unit < more) for unit in range(units)])


def count_distinct(unit_of: npt.NDArray[np.int64], units: int) -> npt.NDArray[np.int64]:
    """Count each token's distinct units, from unit numbers int64 [tokens, topk]; negative ones count as none."""
    seen = np.zeros((len(unit_of), units + 1), dtype=bool)
    np.put_along_axis(seen, np.where(unit_of < 0, units, unit_of), True, axis=1)
    return seen[:, :units].sum(1)


def check_shape(units: int, experts: int, topk: int) -> None:
    """Raise InvalidConfig unless every number is positive, topk <= experts and every unit has an expert."""
    expect(units > 0, "ranks", units, "a positive number")
    expect(experts >= units, "experts", experts, f"at least one for each of {units} ranks or nodes")
    expect(0 < topk <= experts, "topk", topk, f"1 to experts = {experts}")
