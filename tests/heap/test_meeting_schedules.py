"""Rendezvous under chosen schedules: one rank runs at a time, and is chosen again before each use of the store.

The schedules are those of Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs",
ASPLOS 2010: ranks have priorities, the first rank that does not wait runs, and at a few random steps it becomes last.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from moe_rt.errors import MoeRtError
from moe_rt.group import meeting
from moe_rt.group.rendezvous import ThreadGroup

SIZE, SCHEDULES, STEPS, MOST_STEPS, HANGS_S = 3, 150, 150, 5000, 60.0
Seen = list[str]  # for each attempt of a rank, what it gathered, or the class of its error


class Schedule:
    """A store in which every use is a step, and the order in which ranks take their steps."""

    def __init__(self, seed: int) -> None:
        self.store, self._random, self._turn = dist.HashStore(), random.Random(seed), threading.Condition()
        self._order = self._random.sample(range(SIZE), SIZE)
        self._changes = set(self._random.sample(range(STEPS), self._random.randint(1, 4)))
        self._steps, self._began = 0, 0

    def client(self, rank: int) -> Any:
        return _Client(self, rank)

    @contextmanager
    def step(self, rank: int, *, last: bool = False) -> Iterator[None]:
        """Wait until it is this rank's turn; with `last`, until all others wait or have ended."""
        with self._turn:
            self._steps += 1
            assert self._steps < MOST_STEPS, "ranks wait for each other"
            if last or self._steps in self._changes:
                self._order.remove(rank)
                self._order.append(rank)
                self._turn.notify_all()
            assert self._turn.wait_for(lambda: self._order[0] == rank and self._began == SIZE, HANGS_S), "a rank hangs"
            yield

    def run(self, work: Callable[[int], Seen]) -> list[Seen]:
        """Return what `work` returns on each rank."""
        seen: list[Seen] = [[] for _ in range(SIZE)]

        def rank_of_schedule(rank: int) -> None:
            with self._turn:
                self._began += 1
                self._turn.notify_all()
            try:
                seen[rank] = work(rank)
            finally:
                with self._turn:
                    self._order.remove(rank)
                    self._turn.notify_all()

        threads = [threading.Thread(target=rank_of_schedule, args=(rank,), daemon=True) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * HANGS_S)
            assert not thread.is_alive()
        return seen


class _Client:
    """One rank's client of the store."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule, self._rank = schedule, rank

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._schedule.store, name)

        def use(*arguments: Any) -> Any:
            with self._schedule.step(self._rank):
                return real(*arguments)

        return use


def attempts(group: ThreadGroup, faulty: Sequence[Sequence[int]], rounds: int) -> Seen:
    """Make an attempt for each list of ranks that leave it after `rounds` rounds, and one that no rank leaves."""
    seen = []
    for number, leaving in enumerate([*faulty, ()]):
        try:
            with group:
                gathered = []
                for done in range(2):
                    if group.rank in leaving and done == rounds:
                        raise KeyboardInterrupt
                    gathered += group.all_gather(str(number), float("inf"))
            seen.append(",".join(sorted(set(gathered))))
        except (MoeRtError, KeyboardInterrupt, AssertionError) as error:
            seen.append(type(error).__name__)
    return seen


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("faulty", [[[1]], [[0], [0]], [[1], [2]], [[0, 2]]])
def test_no_meeting_mixes_attempts(monkeypatch: pytest.MonkeyPatch, faulty: list[list[int]], rounds: int) -> None:
    """Every rank leaves each attempt that a rank leaves, and all complete the next one, however slow some are."""
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        groups = [ThreadGroup(schedule.client(rank), rank, SIZE, "cpu") for rank in range(SIZE)]
        ranks: dict[int, int] = {}

        def pause(seconds: float, schedule: Schedule = schedule, ranks: dict[int, int] = ranks) -> None:
            with schedule.step(ranks[threading.get_ident()], last=True):
                pass

        def work(rank: int, groups: list[ThreadGroup] = groups, ranks: dict[int, int] = ranks) -> Seen:
            ranks[threading.get_ident()] = rank
            return attempts(groups[rank], faulty, rounds)

        monkeypatch.setattr(meeting.time, "sleep", pause)
        for rank, seen in enumerate(schedule.run(work)):
            expected = ["KeyboardInterrupt" if rank in leaving else "GroupPoisoned" for leaving in faulty]
            expected = [*expected, str(len(faulty))]
            assert seen == expected, f"seed {seed}, rank {rank}"
