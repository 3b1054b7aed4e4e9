"""One meeting of ranks in a store: they gather texts round by round, and leave together or all learn who left and why.

It asks the store and never waits inside it: a client that waits there keeps every other thread of its process from the
store, and with it ranks that this one waits for. In between it looks whether a rank has left by an error, and at the
processes of the ranks that are missing. Keys of a meeting go with the last rank that leaves it. What stays in the store
is one number and one place for each rank, however many meetings there were.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_rt import errors
from moe_rt.errors import CorruptPeer, GroupPoisoned, MoeRtError, PeerDead, PeerTimeout, StoreLost
from moe_rt.heap.processes import Watch, place, watch

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05
_PLACES_AT_ONCE = 4  # processes to learn of in one look: that many ranks do not flood the store
# What peers of the rank that failed raise, too; for any other error of it, GroupPoisoned.
_SHARED = (
    *("InvalidConfig", "SizeOverflow", "ConfigMismatch", "OutOfSharedMemory", "SegmentPermission", "CorruptPeer"),
    *("PeerDead", "PeerTimeout", "StoreLost", "CompileError", "LaunchFailed", "LimitReached"),
    *("CorruptCheckpoint", "WriteFailed"),
)


class Meeting:
    """This rank's part of a meeting; its number is how often this rank has come to one in this store.

    Raises:
        StoreLost: the store cannot be reached; so do `gather` and `raise_first_failure`.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size, self._round = store, rank, size, 0
        self._waited_s = 0.0  # in all rounds together: each with a time of its own would add up to many timeouts
        self._watches: dict[int, Watch | None] = {}
        self._here = place()
        with reaching_store(rank):
            # Counted in the store itself: a process that joins another group on the same store goes on counting.
            self._name = f"moe_rt/{store.add(f'moe_rt/meetings/{rank}', 1)}"
            # Kept for later meetings: a rank that dies in between is never waited for.
            store.set(f"moe_rt/places/{rank}", json.dumps(self._here))
        self._failure, self._left = f"{self._name}/failure", f"{self._name}/left"

    def gather(self, payload: str, timeout_s: float) -> list[str]:
        """Every rank's payload in rank order; raises what the first rank to fail raised, PeerDead or PeerTimeout.

        The time is that of this meeting's waits so far, this one included.
        """
        keys = self._keys(self._round)
        with reaching_store(self._rank):
            self._store.set(keys[self._rank], payload)
            self._wait(keys, timeout_s)
            payloads = [self._store.get(key).decode(errors="replace") for key in keys]
            if self._round > 0:  # everyone who is in this round has read the one before
                self._store.delete_key(self._keys(self._round - 1)[self._rank])
        self._round += 1
        return payloads

    def fail(self, error: BaseException) -> None:
        """Says why this rank will leave. Of several failures, the first one counts."""
        said = error.args[0] if isinstance(error, MoeRtError) else error  # peers' errors name a section of their own
        record = {"rank": self._rank, "error": type(error).__name__, "message": str(said)}
        with contextlib.suppress(dist.DistError):  # who is to be told has lost the store, too
            self._store.compare_set(self._failure, "", json.dumps(record))

    def raise_first_failure(self) -> None:
        """Raises what ended this meeting already, if anything has: a rank that failed, or one that is dead."""
        with reaching_store(self._rank):
            if self._store.check([self._failure]):
                raise self._told()
            everyone = range(self._size)
            self._find_processes(everyone)
            for r in everyone:
                if self._has_ended(r):
                    raise self._dead(r)

    def leave(self) -> None:
        """Ends this rank's part."""
        with contextlib.suppress(dist.DistError):
            if self._store.add(self._left, 1) == self._size:
                self._forget()

    def _keys(self, number: int) -> list[str]:
        return [f"{self._name}/{number}/{r}" for r in range(self._size)]

    def _wait(self, keys: list[str], timeout_s: float) -> None:
        """Returns when all keys are there, and only then or by an error."""
        missing = list(range(self._size)) if not self._store.check(keys) else []
        start = time.monotonic()
        while missing:
            # Looked at before the keys: who fails after this round was in it, and then all keys are there.
            failed = self._store.check([self._failure])
            while missing and self._store.check([keys[missing[0]]]):
                missing.pop(0)
            if not missing:
                self._waited_s += time.monotonic() - start
                return
            if failed:
                raise self._told()
            self._look_for_the_dead(missing, keys)
            waited = time.monotonic() - start
            if self._waited_s + waited > timeout_s:
                raise self._timed_out([r for r in missing if not self._store.check([keys[r]])], timeout_s)
            time.sleep(min(_SHORTEST_PAUSE_S + waited / 8, _LONGEST_PAUSE_S))

    def _look_for_the_dead(self, missing: list[int], keys: list[str]) -> None:
        unknown = [r for r in missing if r not in self._watches]
        self._find_processes(random.sample(unknown, min(len(unknown), _PLACES_AT_ONCE)))
        for r in missing:
            # It may have come, and gone in peace, after the missing were counted.
            if self._has_ended(r) and not self._store.check([keys[r]]):
                raise self._dead(r)

    def _has_ended(self, rank: int) -> bool:
        watched = self._watches.get(rank)
        return watched is not None and watched.has_ended()

    def _find_processes(self, ranks: Iterable[int]) -> None:
        for r in ranks:
            if r not in self._watches and self._store.check([f"moe_rt/places/{r}"]):
                self._watches[r] = self._watch(self._store.get(f"moe_rt/places/{r}"))

    def _watch(self, text: bytes) -> Watch | None:
        """Of the process at a place; None where a process id means something else, or nothing, or nothing is told."""
        with contextlib.suppress(ValueError, RecursionError, OSError):
            found = json.loads(text)
            if isinstance(found, dict) and found.get("where") == self._here["where"]:
                pid = found.get("pid")
                if type(pid) is int and 0 < pid < 2**31 and pid != self._here["pid"]:
                    return watch(pid)
        return None

    def _told(self) -> MoeRtError:
        text, record = self._store.get(self._failure), None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(text)
        if not isinstance(record, dict) or not isinstance(record.get("rank"), int):
            return CorruptPeer(f"failure of a rank: got {text[:80]!r}, expected a JSON object", rank=self._rank)
        name, message, peer = str(record.get("error")), str(record.get("message")), record["rank"]
        if name in _SHARED:
            kind: type[MoeRtError] = getattr(errors, name)
            return kind(message, rank=self._rank, peer=peer)
        return GroupPoisoned(f"rank {peer} gave up: {name}: {message}", rank=self._rank, peer=peer)

    def _dead(self, peer: int) -> MoeRtError:
        if self._store.check([self._failure]):  # it said why before it ended, and after we had looked
            return self._told()
        message = f"rank {self._rank}: the process of rank {peer} ended before it came"
        return PeerDead(message, rank=self._rank, peer=peer)

    def _timed_out(self, missing: list[int], timeout_s: float) -> PeerTimeout:
        message = f"rank {self._rank}: ranks {missing} did not come to make a buffer within {timeout_s:g} s"
        return PeerTimeout(message, rank=self._rank, peer=missing[0] if missing else -1)

    def _forget(self) -> None:
        """Deletes every key of this meeting; nobody is in it any more.

        A rank is at most one round ahead of another, and has left the last one that it passed, and where it failed
        the one before.
        """
        last = [key for number in range(max(self._round - 2, 0), self._round + 2) for key in self._keys(number)]
        for key in (*last, self._failure, self._left):
            self._store.delete_key(key)


@contextlib.contextmanager
def reaching_store(rank: int) -> Iterator[None]:
    """Raises StoreLost for torch's own errors of a store that has ended."""
    try:
        yield
    except dist.DistError as error:
        message = (
            f"rank {rank} cannot reach the group's store any more, expected one that outlives every rank: "
            "served by the process that starts ranks, or a file"
        )
        raise StoreLost(message, rank=rank) from error
