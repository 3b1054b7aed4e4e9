"""An overflow says what its capacity factor risks under the routing at hand, and which factor would be enough."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import ThreadRanks

from moe_rt import Buffer
from moe_rt.config.options import BufferOptions
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.errors import CapacityOverflow
from moe_rt.plan.routing import advice_of, capacity_advice, draw, factor_for, overflow, popularity

RANKS, SIZES = 4, dict(num_max_tokens_per_rank=64, hidden=8, num_topk=2, num_experts=16, dtype=torch.float32)


def overflowing(group: Any, options: dict[str, Any], seed: int, whole: bool) -> str:
    """Dispatch uneven routing until a rank overflows, and return the error's text."""
    generator = torch.Generator().manual_seed(seed + group.rank)
    popular = torch.linspace(0, 2, SIZES["num_experts"])
    with Buffer(group, **SIZES, **options) as buffer:
        for _ in range(50):
            scores = popular + torch.rand(64, SIZES["num_experts"], generator=generator)
            weights, topk_idx = scores.topk(2)
            try:
                given = torch.ones(64, 8), topk_idx, weights
                buffer.dispatch(*given) if whole else buffer.dispatch(*given, wait=False).wait()
            except CapacityOverflow as error:
                return str(error)
    return "no overflow"


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "halves"])
@pytest.mark.parametrize(("layout", "advised"), [("experts", True), ("tokens", False)])
def test_every_rank_reads_the_risk_and_a_factor_that_would_do(layout: str, advised: bool, whole: bool) -> None:
    options = dict(heap="threads", layout=layout, capacity_factor=1.2, overflow="raise")
    for text in ThreadRanks(RANKS).run(overflowing, options, 3, whole):
        assert 'raise capacity_factor, or choose overflow="drop"' in text
        found = re.search(
            r"with routing as on this rank, factor 1.2 overflows with probability (\S+) a step; "
            r"(\S+) for one in 10,000 \(moe-rt docs errors#capacityoverflow\)$",
            text,
        )
        assert bool(found) is advised, text
        if found:
            assert float(found[1]) > 0.5
            assert float(found[2]) > 1.5


def spec_of(**options: Any) -> BufferSpec:
    return BufferSpec.make(Topology.one_node(RANKS), BufferOptions(**options), **SIZES)


def test_experts_are_grouped_by_their_rank() -> None:
    ids = draw(np.random.default_rng(0), 4000, 2, popularity(16, 1.0))
    placement = tuple(np.random.default_rng(1).permutation(np.repeat(np.arange(RANKS), 4)).tolist())
    counts = 1.0 + np.bincount(ids.reshape(-1), minlength=16)
    shares = np.concatenate([counts[np.array(placement) == rank] for rank in range(RANKS)]) / counts.sum()
    text = advice_of(spec_of(capacity_factor=1.5, placement=placement), ids)
    assert text.endswith(capacity_advice(1.5, 64, 2, RANKS, shares))
    assert advice_of(spec_of(capacity_factor=1.5, placement=[0] * 13 + [1, 2, 3]), ids) == ""
    assert advice_of(spec_of(), ids) == ""
    assert advice_of(spec_of(capacity_factor=1.5), ids[:0]) == ""


def test_bounds_of_advice() -> None:
    """A risk that rounds to none is not called 0; more ranks than a law takes a moment for get no advice."""
    assert "probability below 1e-6 a step" in capacity_advice(3.0, 4096, 2, 4, popularity(16, 0.0))
    sizes = SIZES | {"num_experts": 128}
    for ranks, advised in ((64, True), (65, False), (128, False)):
        placement = tuple(e % ranks for e in range(sizes["num_experts"])) if ranks == 65 else None
        options = BufferOptions(capacity_factor=1.5, **({} if placement is None else {"placement": placement}))
        spec = BufferSpec.make(Topology.one_node(ranks), options, **sizes)
        assert bool(advice_of(spec, np.zeros((4, 2), np.int64))) == advised, ranks


def test_a_rare_risk_needs_no_draws() -> None:
    shares = popularity(64, 0.7)
    factor = factor_for(1e-4, 128, 4, 8, shares)
    assert (
        overflow(factor, 128, 4, 8, shares).probability <= 1e-4 < overflow(factor - 0.01, 128, 4, 8, shares).probability
    )
