"""What a rank keeps between meetings with the same ranks, and its place in their store: its ticket, and why it left."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from moe_rt.errors import MoeRtError, PeerTimeout
from moe_rt.heap.board import is_of_now, place_of, read
from moe_rt.heap.processes import Watch, place, watch

_CHANGES = "moe_rt/meetings/changes"
_MOST_FAILURES = 32  # that a place keeps for ranks that have not come yet


class Attendance:
    """One rank's, at the meetings in one store.

    Attributes:
        ticket: of the meeting that this rank is in.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size, self._here = store, rank, size, place()
        self.ticket = ""
        self._valid: bool | None = None  # whether peers may find the ticket and wait for it; None: of an earlier job's
        self._after = ""  # the name of the last meeting that took place, "" before the first
        self._met: list[str] = []  # the tickets of all ranks in it: they are used
        self._failures: list[dict[str, Any]] = []  # why this rank left meetings since then
        self._number = 0  # of the attempt that this rank makes, since then
        self._closed: list[str] = []  # words in the store since then of meetings that do not take place

    def come(self) -> None:
        """Takes a new ticket."""
        valid = read(self._store, _place(self._rank)) is not None if self._valid is None else self._valid
        self.ticket, self._valid = secrets.token_hex(8), True
        self._write(self.ticket)
        if valid:  # a ticket that peers may have read is not any more
            self._store.add(_CHANGES, 1)

    def withdraw(self) -> None:
        """This rank leaves, and no meeting with its ticket takes place."""
        if self._valid:
            self._write("")
            self._store.add(_CHANGES, 1)
            self._valid = False

    def take_place(self, name: str, members: list[str]) -> None:
        """The meeting of these tickets takes place: what was before concerns nobody any more."""
        for word in self._closed:
            self._store.delete_key(word)
        self._after, self._met, self._valid = name, members, False
        self._failures, self._number, self._closed = [], 0, []

    def close(self, word: str) -> None:
        """Keeps a word until the next meeting takes place: until then a peer may come to look at it."""
        self._closed.append(word)

    def is_closed(self, word: str) -> bool:
        """Whether this rank knows that a meeting does not take place."""
        return word in self._closed

    def changes(self) -> str | None:
        """Another one when tickets that had been read are not valid any more."""
        return read(self._store, _CHANGES)

    def place_of(self, rank: int) -> dict[str, Any] | None:
        """What a rank has written to its place."""
        return place_of(read(self._store, _place(rank)))

    def ticket_of(self, rank: int, *, now: bool = False) -> str:
        """The ticket at a rank's place; "" where there is none, or one that is used, or with `now` an earlier job's."""
        return self._ticket_in(rank, self.place_of(rank), now=now)

    def watch_of(self, rank: int) -> tuple[int, Watch | None] | None:
        """The process of a rank, and its watch; None of a rank without a place, or with one of an earlier job.

        There is no watch where a process id means something else, or nothing, or the system does not tell.
        """
        found = self.place_of(rank)
        if found is None or not is_of_now(found):
            return None
        pid, watched = found["pid"], None
        if found["where"] == self._here["where"] and 0 < pid < 2**31 and pid != self._here["pid"]:
            with contextlib.suppress(OSError):
                watched = watch(pid)
        return pid, watched

    def seen_at(self, rank: int) -> tuple[str, bool]:
        """Returns a rank's ticket, as `ticket_of` does, and whether a failure at its place may concern this attempt.

        One read gives both: a rank that fails and comes again writes its new ticket next to why it left, so nobody
        takes the ticket for one of the attempt that has failed.
        """
        found = self.place_of(rank)
        return self._ticket_in(rank, found, now=False), rank != self._rank and bool(self._later_failures(found))

    def first_failure(self) -> dict[str, Any] | None:
        """Returns why this rank's attempt is over, if another rank has said so.

        Attempts are numbered since the last meeting that took place. A failure ends the attempt with its number on
        every rank, whether it has come yet or not. A rank that has waited in vain ends it on those whose tickets it
        had seen; for the others the attempt is the one after, to which that rank has come since, or will.
        """
        places = (self.place_of(r) for r in range(self._size) if r != self._rank)
        failures = [failure for found in places for failure in self._later_failures(found)]
        for failure in sorted(failures, key=lambda failure: (failure["number"], _is_timeout(failure))):
            if failure["number"] < self._number:
                continue
            if not _is_timeout(failure) or failure["came"][self._rank] == self.ticket:
                return failure
            self._number = failure["number"] + 1
        return None

    def end_attempt(self, error: BaseException | None) -> None:
        """Ends this rank's attempt, and says why unless others did."""
        self.first_failure()  # for the attempt's number
        if error is not None:
            came = [self.ticket_of(r, now=True) for r in range(self._size)]
            failure = failure_record(self._rank, error, self._after, self._number, came)
            self._failures = [*self._failures, failure][-_MOST_FAILURES:]
        self._number += 1

    def _ticket_in(self, rank: int, found: dict[str, Any] | None, *, now: bool) -> str:
        if found is None or (now and not is_of_now(found)) or [found["ticket"]] == self._met[rank : rank + 1]:
            return ""
        return str(found["ticket"])

    def _later_failures(self, found: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Returns the failures at a place that are of this rank's attempt, or of later ones."""
        return [
            failure
            for failure in (found["failures"] if found else [])
            if failure["after"] == self._after and failure["number"] >= self._number
            and len(failure["came"]) == self._size and is_of_now(failure)
        ]  # fmt: skip

    def _write(self, ticket: str) -> None:
        record = {**self._here, "ticket": ticket, "since": time.time(), "failures": self._failures}
        self._store.set(_place(self._rank), json.dumps(record))


def failure_record(
    rank: int, error: BaseException, after: str = "", number: int = 0, came: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns why a rank leaves, as others read it."""
    said = error.args[0] if isinstance(error, MoeRtError) else error  # peers' errors name a section of their own
    record = {"rank": rank, "error": type(error).__name__, "message": str(said), "since": time.time()}
    return {**record, "after": after, "number": number, "came": list(came)}


def _is_timeout(failure: dict[str, Any]) -> bool:
    return bool(failure["error"] == PeerTimeout.__name__)


def _place(rank: int) -> str:
    return f"moe_rt/places/{rank}"
