"""Overflow probabilities agree with 10,000 simulated dispatches, for 50 random configurations; --sweep runs all."""

from __future__ import annotations

import numpy as np
import pytest

from moe_rt.plan.routing import factor_for, overflow, popularity, simulate_overflow, wilson

BATCHES, CONFIGURATIONS, ALWAYS = 10_000, 50, 12
# An exact formula is outside of one 95 % interval in 20; of all 50 intervals of this many deviations in 5 % of runs.
ALL_OF_THEM = 3.29


def configuration(number: int) -> tuple[int, int, int, int, float, float]:
    """Return ranks, experts, topk, tokens, sigma and a risk that 10,000 dispatches can show."""
    rng = np.random.default_rng(number)
    ranks = int(rng.choice([2, 3, 4, 8, 16]))
    experts = ranks * int(rng.integers(1, max(2, 64 // ranks + 1)))
    topk = int(rng.integers(1, min(8, experts // 2) + 1))
    tokens = int(rng.choice([4, 16, 64, 128])) if ranks < 16 else int(rng.choice([4, 16]))
    return ranks, experts, topk, tokens, float(rng.choice([0.0, 0.3, 0.7, 1.2])), float(rng.uniform(0.005, 0.9))


@pytest.mark.parametrize(
    "number", [*range(ALWAYS), *(pytest.param(i, marks=pytest.mark.sweep) for i in range(ALWAYS, CONFIGURATIONS))]
)
def test_the_formula_is_within_the_interval(number: int) -> None:
    ranks, experts, topk, tokens, sigma, risk = configuration(number)
    shares = popularity(experts, sigma, seed=number)
    factor = factor_for(risk, tokens, topk, ranks, shares)
    formula = overflow(factor, tokens, topk, ranks, shares)
    simulated = simulate_overflow(factor, tokens, topk, ranks, shares, BATCHES, seed=number)
    low, high = wilson(round(simulated.probability * BATCHES), BATCHES, ALL_OF_THEM)
    inside = simulated.low <= formula.probability <= simulated.high
    sizes = f"R={ranks} E={experts} K={topk} T={tokens} sigma={sigma} factor={factor}"
    print(f"{sizes}: formula {formula.probability:.4f}, simulated {simulated.probability:.4f}, in 95 %: {inside}")
    assert low <= formula.probability <= high, sizes
