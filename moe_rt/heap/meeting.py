"""One meeting of ranks in a store: they gather texts round by round, and leave together or all learn who left and why.

**Names.** Nobody counts meetings: a rank that stayed away from one would count differently from then on, and a job that
is started anew would meet what the one before has left. Whenever a rank comes it draws a *ticket*, a random text, and
writes it to its place in the store. The tickets of all ranks together name the meeting, so what is written under that
name was written by ranks that have read every other's ticket: of this attempt, of this job.

**All or none.** Each round has one word in the store, and the first rank that writes it decides for all: that the round
took place, by a rank that sees all texts, or that it does not, by one that leaves. A ticket serves once.

**Who leaves** before the meeting has its name writes into its place why, in which attempt since the last meeting that
took place, and which tickets it had seen. That ends the same attempt of every rank, of one that has not come yet when
it comes. But a rank that has merely waited for others until its time was up ends nothing for those that come later:
they meet in its next attempt. The number of such changes in the store makes ranks that wait read all places again.
Who leaves a later round writes that into the round's word.

A rank asks the store and never waits inside it: a client that waits there keeps every other thread of its process from
the store, and with it ranks that this one waits for. In between it looks at the processes of ranks that are missing.
Keys of a meeting go with the last rank that leaves it. What stays in the store is a place for each rank and a number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterable

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_rt import errors
from moe_rt.errors import CorruptPeer, GroupPoisoned, MoeRtError, PeerDead, PeerTimeout
from moe_rt.heap.attendance import Attendance, failure_record
from moe_rt.heap.board import failure_of, reaching_store, read
from moe_rt.heap.processes import Watch

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05
_PLACES_AT_ONCE = 4  # processes to learn of in one look: that many ranks do not flood the store
_TAKES_PLACE, _OVER = "takes place", "over"
# What peers of the rank that failed raise, too; for any other error of it, GroupPoisoned.
_SHARED = (
    *("InvalidConfig", "SizeOverflow", "ConfigMismatch", "OutOfSharedMemory", "SegmentPermission", "CorruptPeer"),
    *("PeerDead", "PeerTimeout", "StoreLost", "CompileError", "LaunchFailed", "LimitReached"),
    *("CorruptCheckpoint", "WriteFailed"),
)


class Meeting:
    """This rank's part of a meeting.

    Args:
        attendance: this rank's at the meetings before, if there were any.

    Raises:
        StoreLost: the store cannot be reached; so do `gather` and `raise_first_failure`.
    """

    def __init__(self, store: Store, rank: int, size: int, attendance: Attendance | None = None) -> None:
        self._store, self._rank, self._size, self._round = store, rank, size, 0
        self._me = attendance or Attendance(store, rank, size)
        self._waited_s = 0.0  # in all rounds together: each with a time of its own would add up to many timeouts
        self._name, self._members = "", [""] * size  # none yet, and whose tickets it is made of
        self._takes_place = self._has_failed = self._is_peers_failure = self._has_warned = False
        self._tickets: dict[int, str] = {}  # of those that have come, as far as this rank knows
        self._changes: str | None = ""
        self._watches: dict[int, tuple[int, Watch | None]] = {}
        with reaching_store(rank):
            self._me.come()

    def gather(self, payload: str, timeout_s: float) -> list[str]:
        """Every rank's payload in rank order; raises what the first rank to fail raised, PeerDead or PeerTimeout.

        The time is that of this meeting's waits so far, this one included.
        """
        with reaching_store(self._rank):
            payloads = self._wait(payload, timeout_s)
            if self._takes_place:  # everyone who is in this round has read the one before
                self._store.delete_key(self._keys(self._round - 1)[self._rank])
            else:
                self._begin()
        self._round += 1
        return payloads

    def fail(self, error: BaseException) -> None:
        """Says why this rank will leave. Of several failures, the first one counts."""
        if self._has_failed:
            return
        self._has_failed = True
        with contextlib.suppress(dist.DistError):  # who is to be told has lost the store, too
            if not self._takes_place and not self._close():  # it took place while this rank gave up
                self._begin()
                self._round = 1
            if not self._takes_place:
                self._me.end_attempt(None if self._is_peers_failure else error)
                self._me.withdraw()
            elif not self._is_peers_failure and self._refuse(self._round, error) == _TAKES_PLACE:
                self._refuse(self._round + 1, error)

    def raise_first_failure(self) -> None:
        """Raises what ended this meeting already, if anything has: a rank that failed, or one that is dead."""
        with reaching_store(self._rank):
            self._raise_failure()
            self._watch(range(self._size))
            self._raise_dead()

    def leave(self) -> None:
        """Ends this rank's part."""
        with contextlib.suppress(dist.DistError):
            if not self._takes_place:
                self._me.withdraw()
            elif self._store.add(self._left, 1) == self._size:
                self._forget()

    def _wait(self, payload: str, timeout_s: float) -> list[str]:
        """Returns all payloads when the round takes place, and only then or by an error."""
        start = time.monotonic()
        if self._takes_place:
            self._store.set(self._keys(self._round)[self._rank], payload)
        while (payloads := self._look(payload)) is None:
            waited = time.monotonic() - start
            strangers = [r for r in range(self._size) if r not in self._watches]
            self._watch(random.sample(strangers, min(len(strangers), _PLACES_AT_ONCE)))
            self._raise_dead()
            if (self._waited_s + waited) * 10 > timeout_s and not self._has_warned:
                self._has_warned = True
                warn(self._rank, self._waited_s + waited, self._missing(), timeout_s)
            if self._waited_s + waited > timeout_s:
                error = self._timed_out(timeout_s)
                if self._gives_up(error):
                    raise error
            time.sleep(min(_SHORTEST_PAUSE_S + waited / 8, _LONGEST_PAUSE_S))
        self._waited_s += time.monotonic() - start
        return payloads

    def _look(self, payload: str) -> list[str] | None:
        """The payloads of all ranks, if the round takes place by now. Raises what has ended it."""
        if not self._takes_place:
            self._find_name(payload)
        payloads = self._all_payloads() if self._name else None
        if payloads is None and self._takes_place:
            self._raise_failure()
        return payloads

    def _find_name(self, payload: str) -> None:
        """Reads who has come since; with all tickets there, publishes the payload under the name that they make."""
        changes = self._me.changes()
        if changes != self._changes:
            self._changes = changes
            self._tickets.clear()
            self._raise_failure()
        for r in range(self._size):
            if r not in self._tickets:
                ticket, may_be_over = self._me.seen_at(r)
                if may_be_over:
                    self._raise_failure()
                if not ticket:
                    return
                self._tickets[r] = ticket
        members = [self._tickets[r] for r in range(self._size)]
        name = hashlib.sha256(json.dumps(members).encode()).hexdigest()[:16]
        if name != self._name and not self._me.is_closed(_word(name, 0)) and self._close():
            self._name, self._members = name, members
            self._store.set(self._keys(0)[self._rank], payload)

    def _all_payloads(self) -> list[str] | None:
        """All ranks' payloads, once they are there; the round takes place then, unless a rank has left it."""
        keys = self._keys(self._round)
        if not self._store.check(keys):
            return None
        payloads = [text for key in keys if (text := read(self._store, key)) is not None]
        if len(payloads) < self._size:
            return None
        if self._decide(self._round, _TAKES_PLACE) == _TAKES_PLACE:
            return payloads
        if not self._takes_place:
            self._close()
        return None

    def _begin(self) -> None:
        self._takes_place = True
        self._me.take_place(self._name, self._members)

    def _close(self) -> bool:
        """Whether no meeting takes place under the name that this rank has for it, from here on none."""
        if self._name:
            if self._decide(0, _OVER) == _TAKES_PLACE:
                return False
            self._me.close(_word(self._name, 0))
            self._store.delete_key(self._keys(0)[self._rank])
            self._name = ""
        return True

    def _gives_up(self, error: MoeRtError) -> bool:
        """Whether this rank may leave: the round will not take place."""
        return self._refuse(self._round, error) != _TAKES_PLACE if self._takes_place else self._close()

    def _refuse(self, number: int, error: BaseException) -> str:
        return self._decide(number, json.dumps(failure_record(self._rank, error)))

    def _decide(self, number: int, word: str) -> str:
        """The first word on whether a round takes place, which may be this one."""
        return self._store.compare_set(_word(self._name, number), "", word).decode(errors="replace")

    def _keys(self, number: int) -> list[str]:
        return [f"{_word(self._name, number)}/{r}" for r in range(self._size)]

    @property
    def _left(self) -> str:
        return f"moe_rt/{self._name}/left"

    def _raise_failure(self) -> None:
        """Raises why another rank left, if that ends this one's attempt."""
        if self._takes_place:
            word = read(self._store, _word(self._name, self._round))
            if word in (None, _TAKES_PLACE):
                return
            failure = failure_of(word or "")
            if failure is None:
                message = f"failure of a rank: got {word!r:.80}, expected a JSON object"
                raise CorruptPeer(message, rank=self._rank)
        else:
            failure = self._me.first_failure()
            if failure is None or not self._close():
                return
        self._is_peers_failure = True
        name, message, peer = failure["error"], failure["message"], failure["rank"]
        if name in _SHARED:
            kind: type[MoeRtError] = getattr(errors, name)
            raise kind(message, rank=self._rank, peer=peer)
        raise GroupPoisoned(f"rank {peer} gave up: {name}: {message}", rank=self._rank, peer=peer)

    def _watch(self, ranks: Iterable[int]) -> None:
        for r in ranks:
            if r not in self._watches and (found := self._me.watch_of(r)):
                self._watches[r] = found

    def _raise_dead(self) -> None:
        for r, (pid, watched) in list(self._watches.items()):
            # It may have come, and gone in peace, after the missing were counted.
            if watched is None or not watched.has_ended() or self._is_here(r):
                continue
            found = self._me.watch_of(r)
            if found is not None and found[0] != pid:  # another process is that rank by now
                self._watches[r] = found
                continue
            self._raise_failure()  # it said why before it ended, and after we had looked
            message = f"rank {self._rank}: the process of rank {r} ended before it came"
            raise PeerDead(message, rank=self._rank, peer=r)

    def _is_here(self, rank: int) -> bool:
        return bool(self._name) and self._store.check([self._keys(self._round)[rank]])

    def _missing(self) -> list[int]:
        return [r for r in range(self._size) if not self._is_here(r) and (self._name or not self._has_come(r))]

    def _has_come(self, rank: int) -> bool:
        return bool(self._me.ticket_of(rank, now=True))

    def _timed_out(self, timeout_s: float) -> PeerTimeout:
        missing = self._missing()
        late = [r for r in missing if self._takes_place or self._has_come(r)]
        stayed_away = [r for r in missing if r not in late]
        what = f"{stayed_away} did not come to make a buffer" if stayed_away else f"{late} came, and did not go on"
        message = f"rank {self._rank}: ranks {what} within {timeout_s:g} s"
        return PeerTimeout(message, rank=self._rank, peer=next(iter(stayed_away or late), -1))

    def _forget(self) -> None:
        """Deletes every key of this meeting; nobody is in it any more.

        A rank is at most one round ahead of another, and has left the last one that it passed, and where it failed
        the one before.
        """
        for number in range(self._round + 3):
            for key in (_word(self._name, number), *(self._keys(number) if number >= self._round - 2 else ())):
                self._store.delete_key(key)
        self._store.delete_key(self._left)


def warn(rank: int, waited_s: float, ranks: list[int], timeout_s: float) -> None:
    """Says on stderr for whom making a buffer waits, as ops do."""
    text = f"moe_rt: rank {rank} has waited {waited_s:.3g} s for ranks {ranks} to make a buffer"
    print(f"{text}; PeerTimeout after {timeout_s:g} s", file=sys.stderr, flush=True)


def _word(name: str, number: int) -> str:
    return f"moe_rt/{name}/{number}"
