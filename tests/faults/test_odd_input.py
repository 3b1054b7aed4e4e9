"""Unusual but legal input, and ids at the edges of their type: right output, or the same refusal on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS, HEAPS
from faults import cases_faults
from faults import cases_unusual_input as cases
from support.ranks import Ranks
from support.rounds import full_round
from support.routing import make_spec

MakeRanks = Callable[[str, int], Ranks]
SIZE = 3


@pytest.mark.parametrize("expert", [-(2**63), -2, 9, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1])
def test_id_at_an_edge(make_ranks: MakeRanks, expert: int) -> None:
    """The last entry is bad; some values would be valid ids in 32 bits."""
    idx = torch.zeros(4, 3, dtype=torch.int64)
    idx[3, 2] = expert
    texts = make_ranks("threads", SIZE).run(cases_faults.bad_dispatch, 1, {"topk_idx": idx})
    assert all(text.startswith("InvalidRouting:") and f"expert id {expert} " in text for text in texts), texts


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("where", ["row", "weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_value_that_is_not_finite_stays_in_its_token(
    make_ranks: MakeRanks, heap: str, where: str, value: float
) -> None:
    make_ranks(heap, SIZE).run(cases.one_value_not_finite, where, value)


@pytest.mark.parametrize("heap", HEAPS)
def test_every_subset_of_ranks_without_tokens(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks(heap, SIZE).run(cases.every_subset_without_tokens)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_around_capacity(make_ranks: MakeRanks, heap: str) -> None:
    seen = make_ranks(heap, SIZE).run(cases.around_capacity)
    assert seen == [["fits", "fits", "overflow", "fits"]] * SIZE


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("num_topk", [1, 3, 5, 6])
def test_topk_that_divides_nothing(make_ranks: MakeRanks, heap: str, num_topk: int) -> None:
    spec = make_spec(SIZE, num_topk=num_topk, num_experts=7, hidden=9)
    make_ranks(heap, SIZE).run(full_round, spec, [12, 1, 7], num_topk, "random")


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_experts_up_and_down(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks(heap, SIZE).run(cases.experts_up_and_down)


def test_overlapping_groups(make_ranks: MakeRanks) -> None:
    make_ranks("shm", SIZE).run(cases.overlapping_groups)


@pytest.mark.parametrize("heap", HEAPS)
def test_replay_with_other_counts(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks(heap, SIZE).run(cases.replayed, 9)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_more_ranks_than_cores(make_ranks: MakeRanks, heap: str) -> None:
    args: tuple[Any, ...] = (make_spec(8), [12, 0, 3, 12, 1, 12, 7, 5], 1, "random")
    for _ in range(3):
        make_ranks(heap, 8).run(full_round, *args)
