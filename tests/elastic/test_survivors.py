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


@pytest.mark.parametrize("ended", [True, False])
def test_the_next_group_is_of_the_survivors(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    """Their watches, ranks and store, the old timeout, and attempts that count anew; each attempt has its own keys. A
    rank that was left out has ended, or was silent.
    """
    members, store = object.__new__(ElasticGroup), dist.HashStore()
    watches = [Ends(), Ends(0) if ended else Ends(), Ends(), None]
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
        members.survivors(0.0)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert (members._rank, members._watches, members._store) == (2, watches, store)
    assert members.survivors(0.0) == [0, 2, 3]
    assert made == [("gloo", {"rank": 1, "world_size": 3, "timeout": "the old timeout"})] * 2
    assert members._watches == [watches[0], watches[2], watches[3]]
    assert (members._rank, members._store, members._attempts) == (1, "the new store", 0)


@pytest.mark.parametrize("formed", [False, True])
def test_errors_of_regrouping_name_the_rank(monkeypatch: pytest.MonkeyPatch, formed: bool) -> None:
    """They have the failure to join as their cause, and leave the group as it was."""
    failure = RuntimeError("a rank is dead")
    members, store = object.__new__(ElasticGroup), dist.HashStore()
    members._rank, members._watches, members._store = 1, [Ends(), Ends()], store
    members._name, members._attempts, members._timeout = "name", 0, None  # type: ignore[assignment]
    store.set("moe_rt/survivors/name/1/here/0", "1")
    store.set("moe_rt/survivors/name/1/formed", str(formed))
    done: list[str] = []

    def init_process_group(backend: str, **given: Any) -> None:
        given["store"].set("key", "of the new group")
        raise failure

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(RankExcluded if formed else PeerTimeout) as raised:
        members.survivors(5.0)
    words = (
        "rank 1 came too late: ranks [0, 1] have gone on without it"
        if formed
        else "rank 1: one of the ranks [0, 1] that are left did not join the new group"
    )
    assert str(raised.value).split(" (moe-rt")[0] == words
    assert (raised.value.rank, raised.value.__cause__) == (1, failure)
    assert done == ["destroyed"]
    assert store.get("moe_rt/survivors/name/1/group/key") == b"of the new group"
    assert (members._rank, members._store, len(members._watches)) == (1, store, 2)


def test_a_rank_that_is_left_out_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    members, store = object.__new__(ElasticGroup), dist.HashStore()
    members._rank, members._watches, members._store = 1, [Ends(), Ends()], store
    members._name, members._attempts = "name", 0
    store.set("moe_rt/survivors/name/1/decision", "[0]")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: pytest.fail("it joined"))
    with pytest.raises(RankExcluded) as raised:
        members.survivors(5.0)
    assert (raised.value.rank, raised.value.__cause__) == (1, None)
    assert not store.check(["moe_rt/survivors/name/1/formed"])


def test_a_rank_looks_for_marks_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for as long as it may: at that moment it no longer looks, and between looks it sleeps."""
    clock, events = iter([100.0, 119.0, 119.99, 120.0]), list[str]()
    monkeypatch.setattr(
        elastic, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: events.append("sleeps"))
    )
    members = object.__new__(ElasticGroup)
    members._rank, members._watches = 0, [Ends(), Ends()]
    assert members._decide(dist.HashStore(), 20.0) == [0]
    assert events == ["sleeps"] * 2


def test_peers_on_this_host_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks learn of each other's processes, and take the name that rank 0 has drawn."""
    did: list[Any] = []
    places = [{"name": "of rank 0", "where": "there", "pid": 5}, {"where": "here", "pid": 6}, {"pid": 7}]
    cpu = SimpleNamespace(options=SimpleNamespace(_timeout="the timeout"))
    group = SimpleNamespace(_get_backend=lambda device: did.append(device.type) or cpu)

    def all_gather_records(*given: Any) -> Any:
        did.append(given)
        return places

    def all_or_none(rendezvous: Any, work: Any, what: str, timeout_s: float) -> None:
        did.append((rendezvous, what, timeout_s, work()))

    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    replaced = {
        "_get_default_group": lambda: group, "_default_store": lambda: "store", "place": lambda: dict(places[1]),
        "StoreRendezvous": lambda given: ("rendezvous", given), "all_gather_records": all_gather_records,
        "all_or_none": all_or_none, "watch": lambda pid: f"watch of {pid}",
        "secrets": SimpleNamespace(token_hex=lambda count: f"{count} bytes"),
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(elastic, name, value)
    members = ElasticGroup(7.5)
    meeting = ("rendezvous", group)
    here = {"where": "here", "pid": 6, "name": "8 bytes"}
    assert did == [
        "cpu", (meeting, here, 7.5, "learn of its peers' processes"), (meeting, "watch its peers' processes", 7.5, {}),
    ]  # fmt: skip
    assert (members._rank, members._store, members._timeout) == (1, "store", "the timeout")
    assert (members._name, members._attempts) == ("of rank 0", 0)
    assert members._watches == [None, "watch of 6", None]
    del did[:]
    ElasticGroup()
    assert [did[1][2], did[2][2]] == [300.0, 300.0]
