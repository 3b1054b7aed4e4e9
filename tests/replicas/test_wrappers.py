"""Wrappers, averagers and broadcasts that take experts for replicas are right, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replicas import cases_wrappers as cases
from support.ranks import Ranks

from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


def check_refused(ranks: Ranks, words: str, *args: object) -> None:
    for outcome in ranks.outcomes(*args):
        with pytest.raises(InvalidConfig, match=words):
            raise outcome


@pytest.mark.parametrize("prepared", [False, True], ids=["bare", "prepared"])
@pytest.mark.parametrize("what", cases.REFUSED)
def test_refused(make_ranks: MakeRanks, what: str, prepared: bool) -> None:
    words = r"leave out|copies of one another"
    check_refused(make_ranks("shm", 2), words, cases.refused, what, prepared)


@pytest.mark.parametrize("what", cases.REFUSED_BARE)
def test_refused_without_prepare(make_ranks: MakeRanks, what: str) -> None:
    check_refused(make_ranks("shm", 2), r"leave out|copies of one another", cases.refused, what, False)


@pytest.mark.parametrize("what", ["replicate", "fsdp_replicate", "fully_shard", "fsdp1"])
def test_right_without_the_experts(make_ranks: MakeRanks, what: str) -> None:
    for got, expected in make_ranks("shm", 2).run(cases.right, what):
        torch.testing.assert_close(got, expected)


def test_a_state_of_one_rank_is_not_broadcast(make_ranks: MakeRanks) -> None:
    first = make_ranks("shm", 2).outcomes(cases.broadcast_state)[0]
    with pytest.raises(InvalidConfig, match="broadcast of experts"):
        raise first


def test_a_whole_state_is_broadcast(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 2).run(cases.broadcast_whole_state) == [True, True]


@pytest.mark.parametrize("what", ["all_reduced_gradients", "broadcast_data", "averaged_parameters", "replicate"])
def test_over_a_mesh(make_ranks: MakeRanks, what: str) -> None:
    for outcome in make_ranks("shm", 2).outcomes(cases.over_mesh, what):
        with pytest.raises((InvalidConfig, RuntimeError), match=r"leave out|sharding strategy|mixed"):
            raise outcome


def test_wrappers_that_only_look_are_let(make_ranks: MakeRanks) -> None:
    one, other = make_ranks("shm", 2).run(cases.looked_at)
    assert one == other
