"""Rendezvous in which a peer acts between two lines of a rank: before any one use of the store."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moe_rt import errors
from moe_rt.errors import InvalidConfig, MoeRtError, PeerDead, PeerTimeout, StoreLost
from moe_rt.group import attendance, meeting
from moe_rt.group.attendance import Attendance

MOST_USES = 30  # the wait is polling by then
USED = ("set", "get", "add", "check", "delete_key", "compare_set", "multi_get", "multi_set")


class Acting:
    """A store that calls `act` before its use number `when`, and before each later one while it returns False.

    If it raises, it is called instead of every use from there on.
    """

    def __init__(self, store: Any, when: int, act: Callable[[], bool | None]) -> None:
        self._store, self._when, self._act, self.uses, self._done = store, when, act, 0, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in USED:
            return found

        def use(*arguments: Any) -> Any:
            self.moment()
            return found(*arguments)

        return use

    def moment(self) -> None:
        self.uses += 1
        if self.uses >= self._when and not self._done:
            self._done = self._act() is not False


class Process:
    """A peer's process. It ends when the peer has acted, perhaps just before the rank looks at it."""

    def __init__(self) -> None:
        self.ended = False
        self.moment: Callable[[], None] = lambda: None

    def has_ended(self) -> bool:
        self.moment()
        return self.ended


def outcomes(act_of: Callable[[meeting.Meeting, Process], Callable[[], bool | None]]) -> list[str]:
    """Return what rank 0 gets, for each use of the store before which rank 1, which has come, acts."""
    found = []
    for when in range(1, MOST_USES):
        store, process = dist.HashStore(), Process()
        acting = Acting(store, when, act_of(meeting.Meeting(store, 1, 2), process))
        process.moment = acting.moment
        rank = meeting.Meeting(acting, 0, 2)  # type: ignore[arg-type]
        rank._me.watch_of = lambda _, watched=process: (0, watched)  # type: ignore
        try:
            found.append(" ".join(rank.gather("0", 60.0)))
        except MoeRtError as error:
            found.append(type(error).__name__)
    return found


def says_why_and_ends(peer: meeting.Meeting, process: Process) -> Callable[[], None]:
    def act() -> None:
        peer.fail(InvalidConfig("hidden: got 0"))
        process.ended = True

    return act


def just_ends(peer: meeting.Meeting, process: Process) -> Callable[[], None]:
    def act() -> None:
        process.ended = True

    return act


def comes_again(peer: meeting.Meeting, process: Process) -> Callable[[], bool]:
    ranks = [peer]

    def act() -> bool:
        if ranks == [peer]:
            peer.fail(InvalidConfig("hidden: got 0"))
            ranks.append(meeting.Meeting(peer._store, 1, 2, peer._me))
        else:
            ranks[-1]._look("1")
        return False

    return act


def completes_and_ends(peer: meeting.Meeting, process: Process) -> Callable[[], bool]:
    def act() -> bool:
        if peer._look("1") is None:
            return False
        peer._begin()
        peer._round = 1
        peer.leave()
        process.ended = True
        return True

    return act


def takes_its_text_back(peer: meeting.Meeting, process: Process) -> Callable[[], bool]:
    steps = ["write", "delete", "wait", "write"]

    def act() -> bool:
        peer._find_name("1")
        if not peer._name:
            return False
        key = peer._keys(0)[1]
        step = steps.pop(0)
        if step == "write":
            peer._store.set(key, "1")
        elif step == "delete":
            peer._store.delete_key(key)
        return not steps

    return act


def test_a_peer_that_fails_and_comes_again_ends_the_attempt() -> None:
    """The ticket of the next attempt is never taken for one of the attempt that has failed."""
    assert set(outcomes(comes_again)) == {"InvalidConfig"}


def test_a_peer_that_completes_the_meeting_and_ends_is_not_dead() -> None:
    assert set(outcomes(completes_and_ends)) == {"0 1"}


def test_a_text_that_goes_and_comes_back_is_waited_for() -> None:
    assert set(outcomes(takes_its_text_back)) == {"0 1"}


@pytest.mark.parametrize("steps", ["c", "cc", "cw", "cwc", "cwcw", "jc", "jcw"], ids=str)
def test_a_peer_that_looks_at_any_moment_ends_with_the_ticket_that_counts(steps: str) -> None:
    """A rank comes (c) and withdraws (w), the second time perhaps in the place of an earlier job's (j)."""
    for when in itertools.count(1):
        store = dist.HashStore()
        peer = meeting.Meeting(store, 1, 3)  # rank 2 stays away
        acting = Acting(store, when, lambda peer=peer: peer._find_name("1"))  # type: ignore[misc]
        rank = Attendance(acting, 0, 3)  # type: ignore[arg-type]
        for step in steps:
            if step == "j":
                Attendance(store, 0, 3).come()
                peer._find_name("1")
            else:
                rank.come() if step == "c" else rank.withdraw()
        peer._find_name("1")
        assert peer._tickets.get(0, "") == Attendance(store, 1, 3).ticket_of(0), f"it looked before use {when}"
        if acting.uses < when:
            break


def test_a_peer_that_says_why_and_ends_is_never_just_dead() -> None:
    found = outcomes(says_why_and_ends)
    assert set(found) == {"InvalidConfig"}


def test_a_peer_that_ends_without_a_word_is_dead() -> None:
    assert set(outcomes(just_ends)) == {"PeerDead"}


def test_words_are_read_again_once_the_process_is_seen_to_have_ended() -> None:
    """The peer writes why it leaves, and ends, after this rank has looked for failures and before it looks at it."""
    store = dist.HashStore()
    peer, rank = meeting.Meeting(store, 1, 2), meeting.Meeting(store, 0, 2)

    class Ends(Process):
        def has_ended(self) -> bool:
            peer.fail(InvalidConfig("hidden: got 0"))
            return True

    rank._watches[1] = (0, Ends())  # type: ignore[assignment]
    rank._me.watch_of = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(InvalidConfig, match="hidden: got 0"):
        rank._raise_dead()


@pytest.mark.parametrize("words", [False, True])
def test_a_dead_peer_is_named(words: bool) -> None:
    store, process = dist.HashStore(), Process()
    rank = meeting.Meeting(store, 0, 2)
    rank._watches[1] = (0, process)  # type: ignore[assignment]
    rank._me.watch_of = lambda _: None  # type: ignore[method-assign]
    rank._raise_dead()
    process.ended = True
    with pytest.raises(PeerDead, match="the process of rank 1 ended before it came") as raised:
        rank.raise_first_failure() if words else rank._raise_dead()
    assert raised.value.peer == 1


@pytest.mark.parametrize("known", [[], [1]])
def test_a_dead_peer_is_found_before_any_wait(known: list[int]) -> None:
    rank, process = meeting.Meeting(dist.HashStore(), 0, 3), Process()
    rank._watches.update({r: (0, Process()) for r in known})  # type: ignore[misc]
    process.ended = True
    rank._me.watch_of = lambda r: (0, process) if r == 2 else None  # type: ignore
    with pytest.raises(PeerDead, match="the process of rank 2 ended"):
        rank.raise_first_failure()


def test_a_store_that_fails_at_any_use() -> None:
    """Any use of the store may be the first that fails: the rank raises StoreLost."""

    def lost() -> None:
        raise dist.DistNetworkError("the store is gone")

    for when in itertools.count(1):
        acting = Acting(dist.HashStore(), when, lost)
        try:
            rank = meeting.Meeting(acting, 0, 1)  # type: ignore[arg-type]
            for _ in range(2):
                assert rank.gather("{}", 1.0) == ["{}"]
        except StoreLost:
            continue
        assert acting.uses < when
        assert when > 10
        break


def test_the_latest_of_many_failures_is_read() -> None:
    store = dist.HashStore()
    waits, fails = Attendance(store, 0, 2), Attendance(store, 1, 2)
    for number in range(2 * MOST_USES):
        meeting.Meeting(store, 1, 2, fails).fail(InvalidConfig(f"attempt {number}"))
        rank = meeting.Meeting(store, 0, 2, waits)
        with pytest.raises(InvalidConfig, match=f"attempt {number} ") as raised:
            rank.raise_first_failure()
        rank.fail(raised.value)


@pytest.mark.parametrize("came", [[], [1], [2], [1, 2], [2, 3], [1, 3]], ids=str)
def test_a_timeout_names_the_first_rank_that_did_not_come(came: list[int]) -> None:
    store = dist.HashStore()
    rank, *_ = [meeting.Meeting(store, r, 4) for r in (0, *came)]
    with pytest.raises(PeerTimeout) as raised:
        rank.gather("", 0.001)
    away = [r for r in (1, 2, 3) if r not in came]
    assert raised.value.peer == away[0]
    assert f"ranks {away} did not come" in str(raised.value)


def test_a_timeout_of_a_later_round_names_the_rank_that_did_not_go_on() -> None:
    store = dist.HashStore()
    ranks = met(store, 3)
    store.set(ranks[1]._keys(1)[1], "")
    with pytest.raises(PeerTimeout, match=r"ranks \[2\] came, and did not go on") as raised:
        ranks[0].gather("", 0.001)
    assert (raised.value.rank, raised.value.peer) == (0, 2)


# Errors of one rank's own call or machine: its peers raise that it gave up.
OWN = {
    *("GroupPoisoned", "GroupClosed", "ConcurrentUse", "CallOrderMismatch", "CapacityOverflow", "FaultInjected"),
    *("InvalidInput", "InvalidRouting", "TooManyTokens", "RankExcluded", "MissingPackage", "MoeRtError"),
}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MoeRtError)]


@pytest.mark.parametrize("took_place", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_of_one_rank_on_the_others(kind: type[MoeRtError], took_place: bool) -> None:
    store = dist.HashStore()
    ranks = met(store, 3) if took_place else [meeting.Meeting(store, r, 3) for r in range(3)]
    ranks[1].fail(kind("what rank 1 got", rank=1))
    expected = errors.GroupPoisoned if kind.__name__ in OWN else kind
    for rank in (ranks[0], ranks[2]):
        with pytest.raises(MoeRtError, match="what rank 1 got") as raised:
            rank.raise_first_failure()
        assert (type(raised.value), raised.value.rank, raised.value.peer) == (expected, rank._rank, 1)
        assert (f"rank 1 gave up: {kind.__name__}: " in str(raised.value)) is (kind.__name__ in OWN)
        rank.fail(raised.value)  # which is not another failure


def met(store: Any, size: int) -> list[meeting.Meeting]:
    """Return the meetings of all ranks, each before its second round."""
    ranks = [meeting.Meeting(store, r, size) for r in range(size)]
    for rank in ranks:
        rank._find_name("")
    for rank in ranks:
        rank._begin()
        rank._round = 1
    return ranks


def test_a_rank_that_gives_up_and_a_peer_that_completes_agree() -> None:
    """At a timeout either both have the texts of a round, or neither has."""
    kinds = set()
    for when in range(1, MOST_USES):
        store = dist.HashStore()
        peer, got = meeting.Meeting(store, 1, 2), list[Any]()

        def look(peer: meeting.Meeting = peer, got: list[Any] = got) -> bool:
            with contextlib.suppress(PeerTimeout):
                texts = peer._look("1")
                got.extend([texts] * (texts is not None))
            return bool(got)

        rank = meeting.Meeting(Acting(store, when, look), 0, 2)  # type: ignore[arg-type]
        mine = list[Any]()
        try:
            mine.append(rank.gather("0", 0.0))
        except PeerTimeout as error:
            rank.fail(error)
            rank.leave()
        look()
        assert got[:1] == mine, f"it looked first before use {when}"
        kinds.add(len(mine))
    assert kinds == {0, 1}


def test_a_rank_that_leaves_a_round_that_took_place_ends_the_next() -> None:
    store = dist.HashStore()
    ranks = met(store, 2)
    for rank in ranks:
        store.set(rank._keys(1)[rank._rank], "")
    assert ranks[0].gather("", 60.0) == ["", ""]
    ranks[1].fail(KeyboardInterrupt())  # after it has written its text, before it has read the other
    with pytest.raises(errors.GroupPoisoned, match="rank 1 gave up: KeyboardInterrupt") as raised:
        ranks[0].gather("", 60.0)
    ranks[0].fail(raised.value)
    for rank in reversed(ranks):
        rank.leave()
    assert store.num_keys() == 2 + (store.check(["moe_rt/meetings/changes"])), "a place for each rank, and the counter"


def test_a_rank_that_is_interrupted_while_the_round_takes_place_ends_the_next() -> None:
    """Its peer, which has both texts, raises in the next round, and otherwise in this one."""
    kinds = set()
    for when in range(1, MOST_USES):
        store, got = dist.HashStore(), list[Any]()
        peer = meeting.Meeting(store, 1, 2)

        def look(peer: meeting.Meeting = peer, got: list[Any] = got) -> bool:
            with contextlib.suppress(MoeRtError):
                got.extend([texts] if (texts := peer._look("1")) is not None else [])
            return bool(got)

        rank = meeting.Meeting(Acting(store, when, look), 0, 2)  # type: ignore[arg-type]
        rank._look("0")
        rank.fail(KeyboardInterrupt())
        rank.leave()
        if took_place := bool(got):
            peer._begin()
            peer._round = 1
        kinds.add(took_place)
        with pytest.raises(errors.GroupPoisoned, match="rank 0 gave up: KeyboardInterrupt") as raised:
            peer.gather("", 60.0)
        peer.fail(raised.value)
        peer.leave()
        assert not took_place or store.num_keys() == 2 + store.check(["moe_rt/meetings/changes"]), when
    assert kinds == {False, True}


def test_texts_of_a_round_are_deleted_in_the_next() -> None:
    """However many rounds a meeting has, its keys are a word for each later round and the texts of the last one."""
    store = dist.HashStore()
    ranks = met(store, 2)
    for number in range(1, 7):
        for rank in ranks:
            store.set(rank._keys(number)[rank._rank], "")
        for rank in ranks:
            rank.gather("", 60.0)
        places, words, texts = 2, number, 2
        assert store.num_keys() == places + words + texts
    for rank in ranks:
        rank.leave()
    assert store.num_keys() == 2


def test_another_process_that_has_become_a_rank_is_waited_for() -> None:
    rank, before, after = meeting.Meeting(dist.HashStore(), 0, 2), Process(), Process()
    before.ended = True
    rank._watches[1] = (5, before)  # type: ignore[assignment]
    rank._me.watch_of = lambda _: (6, after)  # type: ignore
    rank._raise_dead()
    assert rank._watches[1] == (6, after)
    after.ended = True
    with pytest.raises(PeerDead, match="the process of rank 1 ended"):
        rank._raise_dead()


def test_words_that_are_no_failure_end_a_round() -> None:
    store = dist.HashStore()
    rank, _ = met(store, 2)
    store.set(meeting._word(rank._name, 1), '{"rank": 1}')
    with pytest.raises(errors.CorruptPeer, match="failure of a rank: got"):
        rank.gather("", 60.0)


def test_a_failure_after_a_meeting_counts_though_one_rank_had_timed_out_before() -> None:
    store = dist.HashStore()
    mine = [Attendance(store, r, 2) for r in range(2)]
    alone = meeting.Meeting(store, 0, 2, mine[0])
    with pytest.raises(PeerTimeout) as late:
        alone.gather("", 0.001)
    alone.fail(late.value)
    alone.leave()
    ranks = [meeting.Meeting(store, r, 2, mine[r]) for r in range(2)]
    for rank in ranks:
        rank._find_name("")
    for rank in ranks:
        rank._begin()
        rank.leave()
    waits = meeting.Meeting(store, 0, 2, mine[0])
    meeting.Meeting(store, 1, 2, mine[1]).fail(InvalidConfig("what rank 1 got"))
    with pytest.raises(InvalidConfig, match="what rank 1 got"):
        waits.raise_first_failure()


def test_a_warning_counts_the_waits_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, warned = itertools.count(0.0, 1.0), []
    monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None))
    monkeypatch.setattr(meeting, "warn", lambda *given: warned.append(given))
    store = dist.HashStore()
    rank, peer = met(store, 2)
    for number in (1, 2):
        keys = rank._keys(number)
        writes = Acting(store, 8, lambda keys=keys: store.set(keys[1], ""))  # type: ignore[misc]
        rank._store = writes  # type: ignore[assignment]
        assert rank.gather("", 40.0) == ["", ""]
        peer._round += 1
    ((who, waited, missing, timeout_s),) = warned
    assert (who, missing, timeout_s) == (0, [1], 40.0)
    assert 4.0 < waited < 8.0, "over both rounds"


@pytest.mark.parametrize(
    ("changes", "watched"),
    [({}, True), ({"where": "another host"}, False), ({"pid": 1 << 31}, False), ({"pid": 0}, False)],
    ids=str,
)
def test_only_processes_of_this_host_are_watched(changes: dict[str, Any], watched: bool) -> None:
    """A number of another host may be a dead process's here."""
    store = dist.HashStore()
    peer = Attendance(store, 1, 2)
    peer._here = {**peer._here, "pid": 1 << 30, **changes}
    peer.come()
    found = Attendance(store, 0, 2).watch_of(1)
    assert found is not None
    assert (found[0], found[1] is not None) == (peer._here["pid"], watched)


def test_a_process_that_cannot_be_watched_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> None:
        raise PermissionError("another user's")

    store = dist.HashStore()
    peer = Attendance(store, 1, 2)
    peer._here = {**peer._here, "pid": 1 << 30}
    peer.come()
    monkeypatch.setattr(attendance, "watch", refuse)
    assert Attendance(store, 0, 2).watch_of(1) == (1 << 30, None)
