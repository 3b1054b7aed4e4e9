"""A meeting of ranks, which gather texts through a store: all complete it, or all learn which rank left and why.

**Names.** No rank counts meetings: a rank that missed one would count differently from then on, and a restarted job
would find what the previous one left. Each time a rank arrives it draws a *ticket*, a random text, and writes it to its
place in the store. The tickets of all ranks together name the meeting. So whatever is written under that name was
written by ranks that have read every ticket: ranks of this attempt of this job.

**All or none.** Each round has one word in the store, and the first rank that writes it decides for all. A rank that
sees all texts writes that the round takes place; a rank that leaves writes that it does not. A ticket is used once.

**Leaving.** A rank that leaves before the meeting has its name writes to its place why, in which attempt since the last
meeting that took place, and which tickets it had seen. That ends the same attempt on every rank, also on one that
arrives later. But a rank that only timed out ends nothing for ranks that arrive later: it meets them in its next
attempt. The store counts such changes, so that waiting ranks read all places again. A rank that leaves a later round
writes the reason into that round's word.

A rank polls the store and never waits inside it: a client that waits there blocks all other threads of its process,
possibly ranks that this one waits for. Between polls it checks the processes of missing ranks. The last rank to leave a
meeting deletes its keys. A place for each rank and one counter stay in the store.
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
from moe_rt.group.attendance import Attendance, failure_record
from moe_rt.group.board import failure_of, reaching_store, read
from moe_rt.group.processes import Watch

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05
_PLACES_AT_ONCE = 4  # processes to look up per poll: this few from every rank do not flood the store
_TAKES_PLACE, OVER = "takes place", "over"
# Errors that peers of the rank that failed also raise. Any other error becomes GroupPoisoned on them.
_SHARED = (
    *("InvalidConfig", "SizeOverflow", "ConfigMismatch", "OutOfSharedMemory", "SegmentPermission", "CorruptPeer"),
    *("PeerDead", "PeerTimeout", "StoreLost", "CompileError", "LaunchFailed", "LimitReached"),
    *("CorruptCheckpoint", "WriteFailed"),
)


class Meeting:
    """This rank's part of a meeting.

    Args:
        attendance: this rank's attendance at earlier meetings, if any.

    Raises:
        StoreLost: the store cannot be reached. `gather` and `raise_first_failure` also raise it.
    """

    def __init__(self, store: Store, rank: int, size: int, attendance: Attendance | None = None) -> None:
        self._store, self._rank, self._size, self._round = store, rank, size, 0
        self._me = attendance or Attendance(store, rank, size)
        self._waited_s = 0.0  # over all rounds: separate limits would add up to many timeouts
        self._name, self._members = "", [""] * size  # none yet, and the tickets that it is derived from
        self._takes_place = self._has_failed = self._is_peers_failure = self._has_warned = False
        self._tickets: dict[int, str] = {}  # of ranks known to have arrived
        self._changes: str | None = ""
        self._watches: dict[int, tuple[int, Watch | None]] = {}
        with reaching_store(rank):
            self._me.come()

    def gather(self, payload: str, timeout_s: float) -> list[str]:
        """Return every rank's payload in rank order. Raise what the first rank to fail raised, PeerDead or PeerTimeout.

        `timeout_s` covers this meeting's waits so far, this one included.
        """
        with reaching_store(self._rank):
            payloads = self._wait(payload, timeout_s)
            if self._takes_place:  # every rank in this round has read the previous one
                self._store.delete_key(self._keys(self._round - 1)[self._rank])
            else:
                self._begin()
        self._round += 1
        return payloads

    def fail(self, error: BaseException) -> None:
        """Announce why this rank will leave. If several ranks fail, the first failure counts."""
        if self._has_failed:
            return
        self._has_failed = True
        with contextlib.suppress(dist.DistError):  # peers have also lost the store
            if not self._takes_place and not self._close():  # it took place while this rank gave up
                self._begin()
            if not self._takes_place:
                self._me.end_attempt(None if self._is_peers_failure else error)
                self._me.withdraw()
            elif not self._is_peers_failure and self._refuse(self._round, error) == _TAKES_PLACE:
                self._refuse(self._round + 1, error)

    def raise_first_failure(self) -> None:
        """Raise what has ended this meeting, if anything: a rank that failed, or one that is dead."""
        with reaching_store(self._rank):
            self._raise_failure()
            self._watch(range(self._size))
            self._raise_dead()

    def leave(self) -> None:
        """End this rank's part in the meeting."""
        with contextlib.suppress(dist.DistError):
            if not self._takes_place:
                self._me.withdraw()
            elif self._store.add(self._left, 1) == self._size:
                self._forget()

    def _wait(self, payload: str, timeout_s: float) -> list[str]:
        """Return all payloads once the round takes place; otherwise raise."""
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
        """Return the payloads of all ranks if the round takes place by now. Raise what has ended it."""
        if not self._takes_place:
            self._find_name(payload)
        payloads = self._all_payloads() if self._name else None
        if payloads is None and self._takes_place:
            self._raise_failure()
        return payloads

    def _find_name(self, payload: str) -> None:
        """Read which ranks have arrived. Once all have, publish the payload under the name that their tickets form."""
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
        """Return all ranks' payloads once they are present. The round then takes place, unless a rank has left it."""
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
        """Abandon the meeting of the current name, if any. False if it has already taken place."""
        if self._name:
            if self._decide(0, OVER) == _TAKES_PLACE:
                return False
            self._me.close(_word(self._name, 0))
            self._store.delete_key(self._keys(0)[self._rank])
            self._name = ""
        return True

    def _gives_up(self, error: MoeRtError) -> bool:
        """True if this rank may leave, because the round will not take place."""
        return self._refuse(self._round, error) != _TAKES_PLACE if self._takes_place else self._close()

    def _refuse(self, number: int, error: BaseException) -> str:
        return self._decide(number, json.dumps(failure_record(self._rank, error)))

    def _decide(self, number: int, word: str) -> str:
        """Write whether a round takes place, unless this is already decided. Return the word that counts."""
        return self._store.compare_set(_word(self._name, number), "", word).decode(errors="replace")

    def _keys(self, number: int) -> list[str]:
        return [f"{_word(self._name, number)}/{r}" for r in range(self._size)]

    @property
    def _left(self) -> str:
        return f"moe_rt/{self._name}/left"

    def _raise_failure(self) -> None:
        """Raise why another rank left, if that ends this rank's attempt."""
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
            # It may have arrived, and exited normally, after the missing ranks were counted.
            if watched is None or not watched.has_ended() or self._is_here(r):
                continue
            found = self._me.watch_of(r)
            if found is not None and found[0] != pid:  # another process has become that rank
                self._watches[r] = found
                continue
            self._raise_failure()  # it may have written why after the last read, before it ended
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
        """Delete every key of this meeting, which no rank is in any more.

        A rank is at most one round ahead of another. It leaves the keys of the last round that it passed and, if it
        failed, of the round before.
        """
        for number in range(self._round + 3):
            for key in (_word(self._name, number), *(self._keys(number) if number >= self._round - 2 else ())):
                self._store.delete_key(key)
        self._store.delete_key(self._left)


def warn(rank: int, waited_s: float, ranks: list[int], timeout_s: float) -> None:
    """Print on stderr which ranks the making of a buffer waits for, as ops do."""
    text = f"moe_rt: rank {rank} has waited {waited_s:.3g} s for ranks {ranks} to make a buffer"
    print(f"{text}; PeerTimeout after {timeout_s:g} s", file=sys.stderr, flush=True)


def _word(name: str, number: int) -> str:
    return f"moe_rt/{name}/{number}"
