"""Ctrl-C: SIGINT to one rank, in Python or while it waits for a late rank."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass

from moe_rt.chaos.outcome import Outcome, after_all, alive, not_raised
from moe_rt.chaos.rank_pool import ENDLESS, RankPool
from moe_rt.chaos.worker import PATIENCE_S

AT_ONCE_S = 20.0  # less than PATIENCE_S, the timeout of a wait for a late rank
PLACES = ("anywhere", "in_an_op", "while_making")


@dataclass(frozen=True)
class Interrupt:
    """The rank must raise KeyboardInterrupt within seconds, and the others an error that names it.

    Attributes:
        rank: the interrupted rank.
        late: rank that is stopped meanwhile, so that the others wait; unused for "anywhere", where all ranks work.
        step: approximate step of the signal, counted from 1; unused for "while_making".
        after_s: additional delay.
    """

    rank: int
    late: int
    where: str
    step: int
    after_s: float
    action = "interrupt"

    @classmethod
    def draw(cls, pace: random.Random, ranks: int) -> Interrupt:
        """Draw any two ranks and any place."""
        rank, late = pace.sample(range(ranks), 2)
        return cls(rank, late, pace.choice(PLACES), pace.randint(1, 10), round(pace.uniform(0.0, 0.2), 3))

    @property
    def text(self) -> str:
        """One-line description."""
        late = "" if self.where == "anywhere" else f", rank {self.late} late"
        return f"interrupt of rank {self.rank} {self.where}, step {self.step} + {self.after_s} s{late}"

    def run(self, pool: RankPool) -> Outcome[Interrupt]:
        """Run the trial. Milliseconds run from the signal until each rank raised; the late rank has none."""
        ranks, making, waits = range(pool.size), self.where == "while_making", self.where != "anywhere"
        fault = f"rank={self.late},at=pre_rendezvous,do=stop" if making else ""
        pool.session(ranks, steps=ENDLESS, fault=fault)
        pool.await_steps(ranks, 0 if making else self.step)
        if waits and not making:
            pool.send_signal(self.late, signal.SIGSTOP)
        if waits:
            pool.await_stop(self.late)
        time.sleep(self.after_s)
        sent = time.monotonic()
        pool.send_signal(self.rank, signal.SIGINT)
        prompt = [rank for rank in ranks if not (waits and rank == self.late)]
        reports = pool.reports(prompt, AT_ONCE_S)
        if waits:
            pool.send_signal(self.late, signal.SIGCONT)
        reports |= pool.reports([rank for rank in ranks if rank not in prompt], 2 * PATIENCE_S)
        milliseconds = [1e3 * (reports[rank]["at"] - sent) for rank in prompt if "at" in reports[rank]]
        complaints = not_raised(reports, [self.rank], {"KeyboardInterrupt"}) + after_all(reports)
        others = [rank for rank in ranks if rank != self.rank]
        if waits and pool.far and reports[self.late]["raised"] == "PeerDead":
            # The others stop waiting after a while for a remote rank to accept their notice of the cause.
            others.remove(self.late)
        complaints += not_raised(reports, others, {"GroupPoisoned"})
        blamed = {rank: reports[rank].get("peer") for rank in others if rank in alive(reports)}
        complaints += [f"rank {r} blamed rank {peer}" for r, peer in blamed.items() if peer != self.rank]
        return Outcome(self, reports, milliseconds, complaints)
