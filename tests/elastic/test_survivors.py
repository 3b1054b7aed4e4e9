"""Survivors of a death regroup immediately, agree on the members, exclude late ranks, and compute correct results."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from elastic import cases_elastic as cases
from support.ranks import ProcessRanks

from moe_rt import elastic
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


class Ends:
    """A process that has ended, or that ends when its rank is looked at this often."""

    def __init__(self, after: int = 1 << 30) -> None:
        self._left = after

    def has_ended(self) -> bool:
        self._left -= 1
        return self._left < 0


def decided(monkeypatch: pytest.MonkeyPatch, marks: str, watches: list[Any], decision: str = "") -> tuple[Any, float]:
    """Return what rank 0 decides, and the seconds that it waits; rank r's mark is there if marks[r] is "x"."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None))
    members, store = object.__new__(ElasticGroup), dist.HashStore()
    members._rank, members._watches = 0, watches
    for rank, mark in enumerate(marks):
        if mark == "x":
            store.set(f"here/{rank}", "1")
    if decision:
        store.set("decision", decision)
    found = members._decide(store, 20.0)
    assert store.get("decision").decode() == json.dumps(found)
    return found, next(clock)


ALIVE, ENDED, FAR = Ends(), Ends(0), None


@pytest.mark.parametrize(
    ("marks", "watches", "survivors", "waits"),
    [
        ("-xx", [ALIVE, ALIVE, FAR], [0, 1, 2], False),
        ("-x-", [ALIVE, ALIVE, ENDED], [0, 1], False),
        ("-xx", [ALIVE, ENDED, ALIVE], [0, 2], False),  # it died after its mark
        ("-x-", [ALIVE, ALIVE, ALIVE], [0, 1], True),
        ("-x-", [ALIVE, ALIVE, FAR], [0, 1], True),
        ("---", [ALIVE, ENDED, ENDED], [0], False),
        ("-x-", [ALIVE, ALIVE, Ends(5)], [0, 1], False),  # it dies while it is waited for
    ],
    ids=range(7),
)
def test_who_is_waited_for_and_who_is_left(
    monkeypatch: pytest.MonkeyPatch, marks: str, watches: list[Any], survivors: list[int], waits: bool
) -> None:
    found, seconds = decided(monkeypatch, marks, watches)
    assert found == survivors
    assert (seconds > 20.0) is waits


def test_a_decision_of_another_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seconds = decided(monkeypatch, "-xx", [ALIVE, ALIVE, Ends(3)], "[1, 2]")
    assert (found, seconds < 20.0) == ([1, 2], True)


def test_the_next_group_is_of_the_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their watches, ranks and store, the old timeout, and attempts that count anew; each attempt has its own keys."""
    members, store = object.__new__(ElasticGroup), dist.HashStore()
    watches = [Ends(), Ends(0), Ends(), None]
    members._rank, members._watches, members._store = 2, list(watches), store
    members._name, members._attempts, members._timeout = "name", 0, "the old timeout"  # type: ignore[assignment]
    made: list[Any] = []

    def init_process_group(backend: str, **given: Any) -> None:
        given.pop("store")
        made.append((backend, given))
        if len(made) == 1:
            raise RuntimeError("a rank is dead")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(elastic, "_default_store", lambda: "the new store")
    for attempt in (1, 2):
        for rank in (0, 3):
            store.set(f"moe_rt/survivors/name/{attempt}/here/{rank}", "1")
    with pytest.raises(PeerTimeout, match=r"rank 2: one of the ranks \[0, 2, 3\]") as raised:
        members.survivors(5.0)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert (members._rank, members._watches, members._store) == (2, watches, store)
    assert members.survivors(5.0) == [0, 2, 3]
    assert made == [("gloo", {"rank": 1, "world_size": 3, "timeout": "the old timeout"})] * 2
    assert members._watches == [watches[0], watches[2], watches[3]]
    assert (members._rank, members._store, members._attempts) == (1, "the new store", 0)
