"""A rank's place in the store of its group, kept between meetings: its ticket, and why it left."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from moe_rt.errors import MoeRtError, PeerTimeout
from moe_rt.group.board import is_of_now, place_of, read
from moe_rt.group.processes import Watch, place, watch

_CHANGES = "moe_rt/meetings/changes"
_MOST_FAILURES = 32  # failures kept at a place for ranks that have not arrived yet


class Attendance:
    """One rank's attendance at the meetings in one store.

    Attributes:
        ticket: ticket for the meeting that this rank is in.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size, self._here = store, rank, size, place()
        self.ticket = ""
        self._valid: bool | None = None  # True if peers may wait for the ticket; None if an earlier job's may be there
        self._after = ""  # name of the last meeting that took place, "" before the first
        self._met: list[str] = []  # tickets of all ranks in it, which are used
        self._failures: list[dict[str, Any]] = []  # why this rank left meetings since then
        self._number = 0  # number of this rank's attempt since then
        self._closed: list[str] = []  # words written since then on meetings that do not take place

    def come(self) -> None:
        """Take a new ticket."""
        valid = read(self._store, _place(self._rank)) is not None if self._valid is None else self._valid
        self.ticket = secrets.token_hex(8)
        self._valid = True
        self._write(self.ticket)
        if valid:  # peers may have read a ticket that is now invalid
            self._store.add(_CHANGES, 1)

    def withdraw(self) -> None:
        """Leave: no meeting with this rank's ticket takes place."""
        if self._valid:
            self._write("")
            self._store.add(_CHANGES, 1)
            self._valid = False

    def take_place(self, name: str, members: list[str]) -> None:
        """Record that the meeting of these tickets takes place, and discard what belongs to attempts before it."""
        for word in self._closed:
            self._store.delete_key(word)
        self._after, self._met, self._valid = name, members, False
        self._failures, self._number, self._closed = [], 0, []

    def close(self, word: str) -> None:
        """Keep a word until the next meeting takes place: a peer may still arrive and read it."""
        self._closed.append(word)

    def is_closed(self, word: str) -> bool:
        """True if this rank knows that the meeting of this word does not take place."""
        return word in self._closed

    def changes(self) -> str | None:
        """Return a value that changes whenever tickets that peers may have read become invalid."""
        return read(self._store, _CHANGES)

    def place_of(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank has written to its place."""
        return place_of(read(self._store, _place(rank)))

    def ticket_of(self, rank: int, *, now: bool = False) -> str:
        """Return the ticket at a rank's place; "" if it has none, or a used one, or with `now` an earlier job's."""
        return self._ticket_in(rank, self.place_of(rank), now=now)

    def watch_of(self, rank: int) -> tuple[int, Watch | None] | None:
        """Return a rank's process id and its watch; None if it has no place, or one of an earlier job.

        The watch is None for this process, for an id that has no meaning here, and if the system refuses.
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
        """Return a rank's ticket, as `ticket_of` does, and True if a failure at its place may concern this attempt.

        One read gives both. A rank that fails and arrives again writes its new ticket next to why it left, so no rank
        takes the ticket for one of the failed attempt.
        """
        found = self.place_of(rank)
        return self._ticket_in(rank, found, now=False), rank != self._rank and bool(self._later_failures(found))

    def first_failure(self) -> dict[str, Any] | None:
        """Return why this rank's attempt is over, if another rank has ended it.

        Attempts are numbered since the last meeting that took place. A failure ends the attempt with its number on
        every rank, also on one that arrives later. A timeout ends it only on ranks whose tickets the waiting rank had
        seen. The others skip that number: the rank that timed out joins their next attempt, or already has.
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
        """End this rank's attempt, and write why unless another rank has."""
        self.first_failure()  # updates the attempt's number
        if error is not None:
            came = [self.ticket_of(r) for r in range(self._size)]
            failure = failure_record(self._rank, error, self._after, self._number, came)
            self._failures = [*self._failures, failure][-_MOST_FAILURES:]
        self._number += 1

    def _ticket_in(self, rank: int, found: dict[str, Any] | None, *, now: bool) -> str:
        if found is None or (now and not is_of_now(found)) or [found["ticket"]] == self._met[rank : rank + 1]:
            return ""
        return str(found["ticket"])

    def _later_failures(self, found: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Return the failures at a place that concern this rank's attempt, or later ones."""
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
    """Return the record of why a rank leaves, which its peers read."""
    said = error.args[0] if isinstance(error, MoeRtError) else error  # peers' errors name their own section
    record = {"rank": rank, "error": type(error).__name__, "message": str(said), "since": time.time()}
    return {**record, "after": after, "number": number, "came": list(came)}


def _is_timeout(failure: dict[str, Any]) -> bool:
    return bool(failure["error"] == PeerTimeout.__name__)


def _place(rank: int) -> str:
    return f"moe_rt/places/{rank}"
