"""Stop the whole group for longer than timeout_s and continue it, as Ctrl-Z, docker pause or a suspended job does."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass

from moe_rt.chaos.outcome import Outcome, after_all, not_done, not_raised
from moe_rt.chaos.rank_pool import ENDLESS, RankPool
from moe_rt.chaos.worker import PATIENCE_S

TIMEOUT_S = 2.0
FROZEN_S = 1.5 * TIMEOUT_S


@dataclass(frozen=True)
class Freeze:
    """Ranks are stopped in one order and continued in another. No rank may raise, and all results must be right.

    Attributes:
        stopped, thawed: the orders.
        gap_s: time between two ranks, short enough that no rank waits for timeout_s while it runs.
        step: approximate step of the freeze.
    """

    stopped: tuple[int, ...]
    thawed: tuple[int, ...]
    gap_s: float
    step: int
    action = "freeze"

    @classmethod
    def draw(cls, pace: random.Random, ranks: int) -> Freeze:
        """Draw a freeze of all ranks together, or one after the other."""
        orders = [tuple(pace.sample(range(ranks), ranks)) for _ in range(2)]
        gap_s = pace.choice([0.0, round(pace.uniform(0.0, 0.1 * TIMEOUT_S / ranks), 3)])
        return cls(orders[0], orders[1], gap_s, pace.randrange(10))

    @property
    def text(self) -> str:
        """One-line description."""
        stopped, thawed = ("".join(map(str, order)) for order in (self.stopped, self.thawed))
        return f"freeze of {stopped} near step {self.step}, thaw of {thawed}, gaps of {self.gap_s} s"

    def run(self, pool: RankPool) -> Outcome[Freeze]:
        """Run a session whose end is set while all ranks are stopped."""
        ranks = range(pool.size)
        pool.session(ranks, steps=ENDLESS, timeout_s=TIMEOUT_S)
        pool.await_steps(ranks, self.step)
        self._send_each(pool, self.stopped, signal.SIGSTOP)
        time.sleep(FROZEN_S)
        last = pool.set_end(ranks)
        self._send_each(pool, self.thawed, signal.SIGCONT)
        reports = pool.reports(ranks, 2 * PATIENCE_S)
        complaints = not_raised(reports, ranks, {"nothing"}) + after_all(reports)
        return Outcome(self, reports, [], complaints + not_done(reports, last))

    def _send_each(self, pool: RankPool, ranks: tuple[int, ...], number: int) -> None:
        for rank in ranks:
            pool.send_signal(rank, number)
            time.sleep(self.gap_s)
