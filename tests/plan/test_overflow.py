"""Statistics of routing agree with draws, and overflow probabilities with simulated dispatches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe_rt.errors import InvalidConfig
from moe_rt.plan import routing
from moe_rt.plan.routing import factor_for, inclusion, overflow, popularity, rank_loads, simulate_overflow, unevenness

# ranks, experts, topk, tokens, sigma, capacity factor
CASES = [(4, 16, 2, 32, 0.0, 1.15), (2, 16, 4, 16, 0.5, 1.2), (8, 32, 1, 16, 0.3, 1.6), (3, 13, 3, 24, 0.0, 1.1)]


@pytest.mark.parametrize(("ranks", "experts", "topk", "tokens", "sigma", "factor"), CASES)
def test_overflow_is_within_the_interval_of_simulated_dispatches(ranks, experts, topk, tokens, sigma, factor) -> None:
    shares = popularity(experts, sigma)
    formula = overflow(factor, tokens, topk, ranks, shares)
    simulated = simulate_overflow(factor, tokens, topk, ranks, shares, batches=2000, seed=1)
    assert formula.rows == simulated.rows
    margin = 0.01  # of another seed
    assert simulated.low - margin <= formula.probability <= simulated.high + margin
    assert 0.02 < simulated.probability < 0.98, "the case would show nothing"


def test_a_buffer_rounds_its_capacity_alike() -> None:
    import torch

    from moe_rt.config.options import BufferOptions
    from moe_rt.config.spec import BufferSpec
    from moe_rt.config.topology import Topology

    sizes = dict(num_max_tokens_per_rank=100, hidden=8, num_topk=3, num_experts=13, dtype=torch.float32)
    for factor in (0.5, 1.25, 3.0, 99.0):
        spec = BufferSpec.make(Topology.one_node(4), BufferOptions(capacity_factor=factor), **sizes)
        assert [spec.capacity(r) for r in range(4)] == [
            routing.capacity_rows(factor, 100, 3, 13, 4, r) for r in range(4)
        ]


def test_inclusion_is_exact() -> None:
    shares = np.array([0.5, 0.3, 0.2])
    assert inclusion(shares, 1) == pytest.approx(shares, abs=1e-6)
    # Two of three drawn by share without replacement: 1 - P(e is the one left out), written out.
    left = [0.3 * 0.2 / 0.7 + 0.2 * 0.3 / 0.8, 0.5 * 0.2 / 0.5 + 0.2 * 0.5 / 0.8, 0.5 * 0.3 / 0.5 + 0.3 * 0.5 / 0.7]
    assert inclusion(shares, 2) == pytest.approx(1 - np.array(left), abs=1e-5)
    assert inclusion(shares, 3).tolist() == [1, 1, 1]


def test_moments_of_loads_agree_with_draws() -> None:
    shares = popularity(32, 1.0)
    loads = rank_loads(64, 4, 4, shares)
    drawn = routing.simulate_loads(np.random.default_rng(2), 64, 4, 4, shares, routing.owners(32, 4), 3000)
    assert drawn.mean(0) == pytest.approx(loads.mean, rel=0.01)
    assert drawn.std(0) == pytest.approx(loads.deviation, rel=0.08)
    assert (drawn < loads.quantile(0.9)).mean(0) == pytest.approx(np.full(4, 0.9), abs=0.03)


def test_the_advised_factor_has_the_risk_that_was_asked_for() -> None:
    shares = popularity(64, 0.5)
    rare, usual = factor_for(1e-4, 128, 8, 8, shares), factor_for(0.3, 128, 8, 8, shares)
    assert usual < rare
    assert overflow(rare, 128, 8, 8, shares).probability <= 1e-4 < overflow(rare - 0.02, 128, 8, 8, shares).probability
    assert overflow(99.0, 128, 8, 8, shares).probability == 0  # the worst case


def test_unevenness_as_people_quote_it() -> None:
    found = unevenness([1.0, 1.0, 4.0])
    assert (found.max_over_mean, found.max_vio) == (2.0, 1.0)
    assert unevenness([5, 5]).cv == 0


def test_traces_are_read_and_checked(tmp_path: Path) -> None:
    ids = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    np.save(tmp_path / "a.npy", ids)
    np.savez(tmp_path / "a.npz", topk_idx=ids, step=np.zeros(1))
    assert (routing.load_trace(tmp_path / "a.npy") == ids).all()
    assert (routing.load_trace(tmp_path / "a.npz", experts=24) == ids).all()
    assert routing.shares_of(ids.astype(np.int64), 24) == pytest.approx(np.full(24, 1 / 24))
    with pytest.raises(InvalidConfig, match="experts: got ids 0 to 23, expected -1 to 15"):
        routing.load_trace(tmp_path / "a.npy", experts=16)
    np.save(tmp_path / "flat.npy", ids.reshape(-1))
    with pytest.raises(InvalidConfig, match=r"got int16 \[24\], expected integers \[tokens, layers, K\]"):
        routing.load_trace(tmp_path / "flat.npy")
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(InvalidConfig, match=r"expected a .npy or .npz file"):
        routing.load_trace(tmp_path / "text.npy")


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("sigma", lambda: popularity(4, -1.0)),
        ("capacity_factor", lambda: overflow(0.0, 1, 1, 1, popularity(2))),
        ("tokens", lambda: rank_loads(0, 1, 1, popularity(2))),
        ("topk", lambda: inclusion(popularity(2), 3)),
        ("experts", lambda: rank_loads(1, 1, 3, popularity(2))),
        ("loads", lambda: unevenness([0, -1])),
        ("probability", lambda: factor_for(0, 1, 1, 1, popularity(2))),
    ],
)
def test_senseless_numbers_are_refused_by_name(field: str, call) -> None:
    with pytest.raises(InvalidConfig, match=f"^{field}: got .*expected"):
        call()
