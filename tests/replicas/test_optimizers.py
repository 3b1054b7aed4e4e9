"""Optimizers, clipping and averages of weights have the results of one process, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replicas import cases_optimizers as cases
from support.ranks import Ranks

from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {"num_experts": 5}) for name in cases.MAKERS] + [(name, {"biases": True}) for name in ("adamw", "rms")],
    ids=str,
)
def test_trains_as_one_process(make_ranks: MakeRanks, name: str, changes: dict[str, object]) -> None:
    expected = cases.trains(None, name, changes)
    for got in make_ranks("shm", 2).run(cases.trains, name, changes):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lbfgs", "lbfgs of experts", "zero"])
def test_refused(make_ranks: MakeRanks, name: str) -> None:
    for outcome in make_ranks("shm", 2).outcomes(cases.refused, name):
        with pytest.raises(InvalidConfig, match="got experts that are spread over ranks"):
            raise outcome


def test_means_over_experts_are_refused(make_ranks: MakeRanks) -> None:
    """Adafactor is refused with biases: it would take the bias vectors of all experts for one matrix."""
    for outcome in make_ranks("shm", 2).outcomes(cases.trains, "adafactor", {"biases": True}):
        with pytest.raises(InvalidConfig, match=r"norm over the experts of each rank: got weights"):
            raise outcome


@pytest.mark.parametrize(
    "how", ["", "foreach", "frozen", "frozen foreach", "frozen only experts", "only experts", "list", "list each"]
)
def test_norms_are_those_of_all_ranks(make_ranks: MakeRanks, how: str) -> None:
    results = make_ranks("shm", 2).run(cases.clipped, how)
    assert len({ours for _, ours in results}) == 1
    for theirs, ours in results:
        assert theirs == pytest.approx(ours, rel=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "partial", "grad mode"])
def test_closures_and_hooks_may_look_at_this_ranks_weights(make_ranks: MakeRanks, kind: str) -> None:
    assert make_ranks("shm", 2).run(cases.closures, kind) == [True, True]


@pytest.mark.parametrize("case", [cases.averaged, cases.accumulated])
def test_sums_and_averages(make_ranks: MakeRanks, case: Callable[..., object]) -> None:
    expected = case(None)
    for got in make_ranks("shm", 2).run(case):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
