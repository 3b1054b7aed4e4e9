"""Rendezvous in which a peer acts between two lines of a rank: before any one use of the store."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from moe_rt.errors import InvalidConfig, MoeRtError, PeerDead, StoreLost
from moe_rt.group import meeting

MOST_USES = 30  # the wait is polling by then
USED = ("set", "get", "add", "check", "delete_key", "compare_set", "multi_get", "multi_set")


class Acting:
    """A store that calls `act` before its use number `when`, or instead of every use from there on if it raises."""

    def __init__(self, store: Any, when: int, act: Callable[[], None]) -> None:
        self._store, self._when, self._act, self.uses = store, when, act, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in USED:
            return found

        def use(*arguments: Any) -> Any:
            self.uses += 1
            if self.uses == self._when:
                self._act()
            return found(*arguments)

        return use


class Process:
    """A peer's process, which the rank sees end when it looks after the peer has acted."""

    def __init__(self) -> None:
        self.ended = False

    def has_ended(self) -> bool:
        return self.ended


def outcomes(act_of: Callable[[meeting.Meeting, Process], Callable[[], None]]) -> list[str]:
    """Return what rank 0 raises, for each use of the store before which rank 1, which has come, acts."""
    found = []
    for when in range(1, MOST_USES):
        store, process = dist.HashStore(), Process()
        acting = Acting(store, when, act_of(meeting.Meeting(store, 1, 2), process))
        rank = meeting.Meeting(acting, 0, 2)  # type: ignore[arg-type]
        rank._me.watch_of = lambda _, watched=process: (0, watched)  # type: ignore
        try:
            rank.gather("{}", 60.0)
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
