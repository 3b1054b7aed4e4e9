"""Rendezvous in which a peer acts between two lines of a rank: before any one use of the store."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from moe_rt import errors
from moe_rt.errors import InvalidConfig, MoeRtError, PeerDead, PeerTimeout, StoreLost
from moe_rt.group import meeting
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
            found.append(" ".join(rank.gather("0", 5.0)))
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


def test_a_dead_peer_is_found_before_any_wait() -> None:
    rank, process = meeting.Meeting(dist.HashStore(), 0, 3), Process()
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
    ranks = [meeting.Meeting(store, r, 3) for r in range(3)]
    for rank in ranks:
        rank._find_name("")
    for rank in ranks:
        rank._begin()
        rank._round = 1
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
    ranks = [meeting.Meeting(store, r, 3) for r in range(3)]
    for rank in ranks * took_place:
        rank._find_name("")
    for rank in ranks * took_place:
        rank._begin()
        rank._round = 1
    ranks[1].fail(kind("what rank 1 got", rank=1))
    expected = errors.GroupPoisoned if kind.__name__ in OWN else kind
    for rank in (ranks[0], ranks[2]):
        with pytest.raises(MoeRtError, match="what rank 1 got") as raised:
            rank.raise_first_failure()
        assert (type(raised.value), raised.value.rank, raised.value.peer) == (expected, rank._rank, 1)
        assert (f"rank 1 gave up: {kind.__name__}: " in str(raised.value)) is (kind.__name__ in OWN)
        rank.fail(raised.value)  # which is not another failure
