"""Survivors of a death regroup immediately, agree on the members, exclude late ranks, and compute correct results."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from elastic import cases_elastic as cases
from support.ranks import ProcessRanks

from moe_rt.elastic import ElasticGroup
from moe_rt.errors import InvalidConfig, PeerTimeout, RankExcluded

SIZE = 3


def outcomes(case: object, *args: object) -> list[object]:
    """Run the case on fresh ranks, some of which will die."""
    ranks = ProcessRanks(SIZE)
    try:
        return ranks.outcomes(case, *args)
    finally:
        ranks.close()


@pytest.mark.parametrize("victims", [[1, 0], [0, 1]])
def test_one_after_another(victims: list[int]) -> None:
    seen = outcomes(cases.fewer_and_fewer, victims)
    (last,) = (rank for rank, outcome in enumerate(seen) if not isinstance(outcome, ChildProcessError))
    assert seen[last] == [("PeerDead", 2, 2), ("PeerDead", 1, 1)], "no rank keeps a descriptor of a dead one"


def test_two_at_once() -> None:
    assert outcomes(cases.two_die_at_once)[0] == 1


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_does_not_join(dies: bool) -> None:
    seen = outcomes(cases.late_for_the_new_group, dies)
    for rank in (0,) if dies else (0, 2):
        message = f"rank {rank}: one of the ranks [0, 2] that are left did not join the new group"
        assert seen[rank][0].startswith(message)
        assert seen[rank][1] == (1 if dies else 2)


def test_a_slow_rank_is_waited_for() -> None:
    assert outcomes(cases.slow_rank_is_waited_for) == [SIZE] * SIZE


def test_a_rank_that_wakes_up_late_is_left_out() -> None:
    seen = outcomes(cases.stopped_rank_wakes_up_late)
    error, refusal, size = seen[1]
    assert (error, size) == ("GroupPoisoned", 0)
    assert refusal.startswith("rank 1 came too late: ranks [0, 2] have gone on without it")
    for rank in (0, 2):
        error, refusal, size = seen[rank]
        assert error in ("PeerTimeout", "GroupPoisoned")
        assert (refusal, size) == ("", 2)


def test_a_store_that_died_with_its_rank() -> None:
    for text in outcomes(cases.store_dies_with_rank_0)[1:]:
        assert text.startswith("StoreLost: rank")
        assert "expected one that outlives every rank" in text


def test_only_gloo_goes_on() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InvalidConfig, match="got back end fake, expected gloo"):
            ElasticGroup()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("formed", [False, True])
def test_the_first_word_on_whether_the_group_was_made_counts(monkeypatch: pytest.MonkeyPatch, formed: bool) -> None:
    """Another rank's word on whether the group formed overrides what this rank observes: a rank that went by its own
    observation would end up in a different group.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    members = ElasticGroup()
    dist.PrefixStore(f"moe_rt/survivors/{members._name}/1", members._store).set("formed", str(formed))
    try:
        with monkeypatch.context() as patch:
            if formed:
                patch.setattr(dist, "init_process_group", failing)
            with pytest.raises(RankExcluded if formed else PeerTimeout):
                members.survivors()
        assert members.survivors() == [0], "a second call decides anew"
    finally:
        dist.destroy_process_group()


def test_what_a_job_before_decided_counts_no_more() -> None:
    """Decisions of an earlier job over the same store do not count."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    before = dist.PrefixStore("moe_rt/survivors/1", dist.distributed_c10d._get_process_group_store(dist.group.WORLD))
    before.set("decision", "[]")
    try:
        assert ElasticGroup().survivors() == [0]
    finally:
        dist.destroy_process_group()


def failing(*args: object, **kwargs: object) -> None:
    raise RuntimeError("Connection closed by peer")
