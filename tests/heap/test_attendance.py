"""Ranks rendezvous again after one was absent, failed or was restarted, and their errors are right."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from test_meeting import SIZE, Pauses, clients, on_threads

from moe_rt.errors import (
    CallOrderMismatch,
    ConfigMismatch,
    GroupPoisoned,
    InvalidConfig,
    LimitReached,
    MoeRtError,
    PeerDead,
    PeerTimeout,
    SegmentPermission,
)
from moe_rt.group.all_or_none import agree, all_or_none, own_part, take_all_or_none
from moe_rt.group.attendance import Attendance
from moe_rt.group.meeting import Meeting
from moe_rt.group.rendezvous import Rendezvous, all_gather_records

LONG_S = 60.0


def in_words(work: Callable[[], Any]) -> Any:
    """Return the result, or the class and message of the error."""
    try:
        return work()
    except (MoeRtError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def seats(store: Any = None) -> list[Rendezvous]:
    store = store or dist.HashStore()
    return [Rendezvous(store, rank, SIZE) for rank in range(SIZE)]


def meet(rank: Rendezvous, timeout_s: float = LONG_S) -> Any:
    return in_words(lambda: rank.all_gather(str(rank.rank), timeout_s))


def all_meet(ranks: list[Rendezvous]) -> list[Any]:
    seen: list[Any] = [None] * SIZE
    on_threads(lambda rank: seen.__setitem__(rank, meet(ranks[rank])))
    return seen


def raising(error: BaseException) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        raise error

    return work


EVERYONE = [["0", "1", "2"]] * SIZE


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_who_stayed_away_comes_to_the_next(kind: str, tmp_path: Path) -> None:
    """A rank that was absent once or twice takes part in the next rendezvous, as does another that is absent
    afterwards."""
    stores = clients(kind, tmp_path)
    ranks = [Rendezvous(stores[rank], rank, SIZE) for rank in range(SIZE)]
    for away, times in ((1, 1), (1, 2), (0, 1)):
        for _ in range(times):
            for rank in ranks[:away] + ranks[away + 1 :]:
                assert "PeerTimeout" in meet(rank, 0.01)
        assert all_meet(ranks) == EVERYONE


def test_a_rank_that_gives_up_ends_the_wait_of_all_that_had_come() -> None:
    ranks, seen = seats(), {}
    waits = threading.Thread(target=lambda: seen.update({2: meet(ranks[2], 1000.0)}), daemon=True)
    waits.start()
    with ranks[0]:  # it stays in until rank 2 is known to have arrived
        while not ranks[0]._seat.attendance.ticket_of(2):
            time.sleep(0.001)
        seen[0] = meet(ranks[0], 0.01)
    waits.join(LONG_S)
    assert seen[0] == seen[2]
    assert seen[2].startswith("PeerTimeout: rank 0: ranks [1] did not come to make a buffer within 0.01 s")
    assert all_meet(ranks) == EVERYONE, "and rank 1 is not told of what it had no part in"


def test_a_rank_that_came_and_was_not_done_is_told_so() -> None:
    store = dist.HashStore()
    waiting, slow = Rendezvous(store, 0, 2), Rendezvous(store, 1, 2)
    with slow:
        said = [meet(waiting, 0.01), meet(slow)]
    assert said[0] == said[1]
    assert said[0].startswith("PeerTimeout: rank 0: ranks [1] came, and did not go on within 0.01 s")


def test_failures_before_others_come_are_met_one_by_one() -> None:
    """Each failure of a rank that is ahead ends one attempt of its peers: two failures end their first two attempts."""
    ranks = seats()
    for words in ("first", "second"):
        said = in_words(lambda words=words: all_or_none(ranks[1], raising(InvalidConfig(words)), "work", LONG_S))
        assert said.startswith(f"InvalidConfig: {words}")
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}

    def go_on(rank: int) -> None:
        while not seen[rank] or isinstance(seen[rank][-1], str):
            seen[rank].append(meet(ranks[rank]))

    on_threads(go_on)
    assert seen[1] == EVERYONE[:1]
    for rank in (0, 2):
        assert [str(words)[:21] for words in seen[rank]] == [
            "InvalidConfig: first ",
            "InvalidConfig: second",
            "['0', '1', '2']",
        ]


def test_a_failure_before_a_meeting_that_took_place_is_over() -> None:
    """A failure recorded for an absent rank counts until that rank arrives; a rendezvous that took place supersedes
    it."""
    ranks = seats()
    assert in_words(lambda: all_or_none(ranks[1], raising(InvalidConfig("own")), "work", LONG_S))
    for rank in (0, 2):
        assert meet(ranks[rank]).startswith("InvalidConfig: own")
    assert all_meet(ranks) == EVERYONE
    for rank in (0, 2):
        assert meet(ranks[rank], 0.01).startswith("PeerTimeout: rank ")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_ranks_that_fail_in_the_same_attempt_meet_in_the_next(order: tuple[int, ...]) -> None:
    ranks = seats()
    for rank in order:
        said = in_words(lambda rank=rank: all_or_none(ranks[rank], raising(InvalidConfig("own")), "work", LONG_S))
        assert said.startswith("InvalidConfig: own")
    assert all_meet(ranks) == EVERYONE


def test_an_interrupt_in_the_middle_is_over_for_all() -> None:
    ranks, seen = seats(), {}

    def work(rank: int) -> None:
        def both_rounds() -> None:
            with ranks[rank]:
                ranks[rank].all_gather("", LONG_S)
                if rank == 1:
                    raise KeyboardInterrupt
                ranks[rank].all_gather("", LONG_S)

        seen[rank] = in_words(both_rounds)

    on_threads(work)
    assert seen.pop(1) == "KeyboardInterrupt: "
    assert all(said.startswith(f"{GroupPoisoned.__name__}: rank 1 gave up: Keyboard") for said in seen.values())
    assert all_meet(ranks) == EVERYONE


@pytest.mark.parametrize("number", [0, 1])
def test_a_round_takes_place_for_all_or_for_none(number: int) -> None:
    """A round takes place for all ranks or none: rank 1 leaves before rank 0 reads both texts."""
    store = dist.HashStore()
    meetings = [Meeting(store, rank, 2) for rank in (0, 1)]
    for here in meetings:
        here._find_name("")
    for here in meetings * number:
        here._begin()
        here._round = 1
        store.set(here._keys(1)[here._rank], "")
    assert meetings[1]._gives_up(PeerTimeout("rank 1 gave up"))
    for key in meetings[0]._keys(number):
        store.set(key, "")
    assert meetings[0]._all_payloads() is None
    assert meetings[1]._name == ("" if number == 0 else meetings[0]._name)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_does_not_leave_a_round_that_takes_place(number: int) -> None:
    """A rank does not leave a round that takes place: another rank has read both texts when it times out."""
    store = dist.HashStore()
    meetings = [Meeting(store, rank, 2) for rank in (0, 1)]
    for here in meetings:
        here._find_name("0")
    for here in meetings * number:
        here._begin()
        here._round = 1
        store.set(here._keys(1)[here._rank], "1")
    assert meetings[0]._all_payloads() == [str(number)] * 2
    assert not meetings[1]._gives_up(PeerTimeout("rank 1 gave up"))
    assert meetings[1]._all_payloads() == [str(number)] * 2


def test_ranks_that_meet_for_different_things_all_raise() -> None:
    ranks, seen = seats(), {}
    purposes = ["make a layer", "make a buffer", "make a layer"]

    def work(rank: int) -> None:
        seen[rank] = in_words(lambda: all_gather_records(ranks[rank], {}, LONG_S, purposes[rank]))

    on_threads(work)
    said = f"{CallOrderMismatch.__name__}: rank 1 came to make a buffer, expected to make a layer as rank 0"
    assert all(text.startswith(said) for text in seen.values()), seen
    assert all_meet(ranks) == EVERYONE


def test_a_key_that_vanishes_holds_nobody_past_its_time() -> None:
    store = dist.HashStore()
    lost = SimpleNamespace(
        **{name: getattr(store, name) for name in ("set", "add", "delete_key", "compare_set")},
        check=lambda keys: True,
        get=lambda key: pytest.fail("waits as long as the store's own time-out"),
    )
    other, rank = Rendezvous(lost, 1, 2), Rendezvous(lost, 0, 2)
    with other:
        assert meet(rank, 0.01).startswith("PeerTimeout")


def test_a_long_wait_is_announced_once(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = seats()
    with ranks[2]:
        assert meet(ranks[0], 0.2).startswith("PeerTimeout")
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("moe_rt: rank 0 has waited ")]
    assert len(lines) == 1
    assert lines[0].endswith(" s for ranks [1] to make a buffer; PeerTimeout after 0.2 s")


def forked(rank: int, path: Path, work: Callable[[Rendezvous], None]) -> int:
    process = os.fork()
    if process == 0:
        try:
            work(Rendezvous(dist.FileStore(str(path), -1), rank, 2))
        finally:
            os._exit(1)
    return process


def meet_and_say(rank: Rendezvous) -> None:
    os._exit(0 if meet(rank) == ["0", "1"] else 2)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("before", ["0 waited", "1 waited", "both met", "1 failed", "0 left"])
def test_a_job_that_starts_anew_over_the_same_store(before: str, tmp_path: Path) -> None:
    """Processes of a restarted job neither rendezvous with the dead ones, nor believe their records."""
    path = tmp_path / "store"
    path.touch()

    def work(rank: Rendezvous) -> None:
        if before == "both met":
            meet(rank)
        elif before == "1 failed":
            in_words(lambda: all_or_none(rank, raising(InvalidConfig("of the job before")), "work", LONG_S))
        elif before == "0 left":
            meet(rank, 0.01)
        with rank:
            (tmp_path / f"{os.getpid()} has come").touch()
            if before == "both met":
                signal.pause()
            rank.all_gather("of the job before", LONG_S)

    first = [forked(int(r), path, work) for r in ("0", "1") if before[0] in (r, "b")]
    while not all((tmp_path / f"{process} has come").exists() for process in first):
        time.sleep(0.001)
    with path.open() as store:
        fcntl.flock(store, fcntl.LOCK_EX)  # half a record in the file would block all later readers
        for process in first:
            os.kill(process, signal.SIGKILL)
            ended(process)
    for early in (0, 1):
        time.sleep(10 / os.sysconf("SC_CLK_TCK"))  # more than the resolution of the system's clock of process starts
        second = [forked(early, path, meet_and_say)]
        time.sleep(0.05)
        second.append(forked(1 - early, path, meet_and_say))
        assert [ended(process) for process in second] == [0, 0]


@pytest.mark.parametrize("timed_out", [1, 2])
def test_of_failures_in_one_attempt_a_time_out_counts_last(timed_out: int) -> None:
    """The failure that made a rank wait says more than its timeout, for any order of ranks."""
    store = dist.HashStore()
    ranks = [Meeting(store, rank, 3) for rank in range(3)]
    for ticket in range(3):
        assert ranks[0]._me.ticket_of(ticket)
    ranks[timed_out].fail(PeerTimeout("rank 0 did not come"))
    ranks[3 - timed_out].fail(InvalidConfig("hidden: got 0"))
    with pytest.raises(InvalidConfig, match="hidden: got 0"):
        ranks[0].raise_first_failure()


@pytest.mark.parametrize("error", [PeerTimeout("rank 0 did not come"), InvalidConfig("hidden: got 0")])
def test_failures_of_a_smaller_group_over_the_same_store_end_nothing(error: Exception) -> None:
    store = dist.HashStore()
    Meeting(store, 1, 2).fail(error)
    for rank in (0, 2):
        assert Attendance(store, rank, 3).first_failure() is None


def test_an_attempt_that_a_timeout_skipped_may_end_by_a_failure() -> None:
    """Rank 1 timed out twice without this rank, and then failed: one look finds that."""
    store = dist.HashStore()
    peer, late = Attendance(store, 1, 2), Attendance(store, 0, 2)
    for error in (PeerTimeout("rank 0 did not come"), PeerTimeout("again"), InvalidConfig("hidden: got 0")):
        Meeting(store, 1, 2, peer).fail(error)
    late.come()
    failure = late.first_failure()
    assert failure is not None
    assert failure["error"] == "InvalidConfig"


def test_words_of_all_attempts_go_when_a_meeting_takes_place() -> None:
    store = dist.HashStore()
    rank = Attendance(store, 0, 2)
    rank.come()
    for number in range(3):
        store.set(f"word {number}", "over")
        rank.close(f"word {number}")
    rank.take_place("name", [rank.ticket, "other"])
    assert not any(store.check([f"word {number}"]) for number in range(3))


def test_the_first_of_several_attempts_ends_first() -> None:
    store = dist.HashStore()
    attendances = [Attendance(store, rank, 3) for rank in range(3)]
    for text in ("first", "second"):
        Meeting(store, 2, 3, attendances[2]).fail(InvalidConfig(f"{text} of rank 2"))
    Meeting(store, 1, 3, attendances[1]).fail(InvalidConfig("first of rank 1"))
    waiting = Meeting(store, 0, 3, attendances[0])
    with pytest.raises(InvalidConfig, match="first of rank") as raised:
        waiting.raise_first_failure()
    waiting.fail(raised.value)
    with pytest.raises(InvalidConfig, match="second of rank 2"):
        Meeting(store, 0, 3, attendances[0]).raise_first_failure()


def test_a_failure_ends_the_attempt_to_which_its_rank_came() -> None:
    """A failure ends the attempt that its rank reached: rank 1 missed the first one, for which rank 0 waited, and fails
    in its own first, which is rank 0's second."""
    store = dist.HashStore()
    waiting = Attendance(store, 0, 2)
    first = Meeting(store, 0, 2, waiting)
    with pytest.raises(PeerTimeout) as late:
        first.gather("", 0.01)
    first.fail(late.value)
    second = Meeting(store, 0, 2, waiting)
    Meeting(store, 1, 2).fail(InvalidConfig("what rank 1 got"))
    with pytest.raises(InvalidConfig, match="what rank 1 got"):
        second.raise_first_failure()


@pytest.mark.parametrize("values", list(itertools.product("ab", repeat=SIZE)), ids="".join)
def test_all_ranks_name_the_first_that_differs_from_rank_0(values: tuple[str, ...]) -> None:
    ranks, seen = seats(), {}

    def work(rank: int) -> None:
        record = {"same": 1, "hidden": values[rank], "topk": values[rank]}
        seen[rank] = error_of(lambda: agree(ranks[rank], record, LONG_S, "make its configuration"))

    on_threads(work)
    faulty = next((rank for rank in range(SIZE) if values[rank] != values[0]), None)
    for rank, error in seen.items():
        if faulty is None:
            assert error is None
            continue
        assert (type(error), error.rank, error.peer) == (ConfigMismatch, rank, faulty)
        said = f"hidden: got {values[faulty]} on rank {faulty}, expected {values[0]} as on rank 0 "
        assert str(error).startswith(said)


@pytest.mark.parametrize("faulty", range(SIZE))
def test_a_rank_that_refuses_its_own_configuration_is_named(faulty: int) -> None:
    ranks, seen = seats(), {}

    def configure(rank: int) -> None:
        with ranks[rank]:
            with own_part(ranks[rank], "make its configuration"):
                if rank == faulty:
                    raise InvalidConfig("hidden: got 0", rank=rank)
            agree(ranks[rank], {}, LONG_S, "make its configuration")

    on_threads(lambda rank: seen.__setitem__(rank, error_of(lambda: configure(rank))))
    assert str(seen.pop(faulty)).startswith("hidden: got 0")
    for rank, error in seen.items():
        assert (type(error), error.rank, error.peer) == (InvalidConfig, rank, faulty)
        assert str(error).startswith(f"rank {faulty} refused its own configuration: hidden: got 0")


class FailsLater:
    """A rendezvous that knows from the look with this number on why another rank failed."""

    rank = 0

    def __init__(self, when: int) -> None:
        self.looks, self._when = 0, when

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    def raise_first_failure(self) -> None:
        self.looks += 1
        if self.looks >= self._when:
            raise PeerDead("the process of rank 1 ended", peer=1)


@pytest.mark.parametrize(
    ("error", "when", "expected"),
    [
        (ValueError("no such segment"), 1, PeerDead),
        (ValueError("no such segment"), 2, InvalidConfig),
        (SegmentPermission("no such process"), 1, PeerDead),
        (SegmentPermission("no such process"), 3, PeerDead),
    ],
    ids=str,
)
def test_work_that_fails_because_of_a_peer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, when: int, expected: type[MoeRtError]
) -> None:
    """A killed process loses its descriptors before it is known to have ended, so a refusal waits for that."""
    monkeypatch.setattr("moe_rt.group.all_or_none.time", Pauses())
    rendezvous: Any = FailsLater(when)
    found = error_of(lambda: take_all_or_none(rendezvous, raising(error), "map", LONG_S))  # type: ignore[arg-type]
    assert type(found) is expected
    assert rendezvous.looks == (when if expected is PeerDead else 1)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(
    ("number", "limit"),
    [(errno.EMFILE, "descriptors (ulimit -n)"), (errno.ENFILE, "descriptors on this host"), (errno.EAGAIN, "threads")],
)
def test_limits_of_the_system_are_named(number: int, limit: str, ours: bool) -> None:
    def work() -> None:
        error = OSError(number, os.strerror(number))
        with own_part(Rendezvous(dist.HashStore(), 1, 2), "make its segment"):
            if ours:
                raise SegmentPermission("could not make a segment") from error
            raise error

    found = error_of(work)
    assert (type(found), found.rank) == (LimitReached, 1)
    said = f"rank 1 could not make its segment: got {os.strerror(number)}, expected room for more {limit}"
    assert str(found).startswith(said)


def error_of(work: Callable[[], Any]) -> Any:
    """Return the error, or None."""
    try:
        work()
    except MoeRtError as error:
        return error
    return None
