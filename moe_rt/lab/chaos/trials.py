"""Trials on one host other than an injected fault: freeze, interrupt, scarce resources, evaluation."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass

from moe_rt.lab.chaos.outcome import Outcome, after_all, alive, not_done, not_raised, steps_of_all
from moe_rt.lab.chaos.rank_pool import ENDLESS, RankPool
from moe_rt.lab.chaos.worker import MODES, PATIENCE_S
from moe_rt.lab.testing.resources import KINDS

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
        pool.session(ranks, steps=ENDLESS, timeout_s=TIMEOUT_S, sizes={"depth": 1 + self.step % 2})
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


COMES_S = 0.5  # a rank that has begun to make a buffer is with the others by then
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
        pool.session(ranks, steps=ENDLESS, fault=fault, sizes={"depth": 1 + self.step % 2})
        pool.await_steps(ranks, 0 if making else self.step)
        if waits and not making:
            pool.send_signal(self.late, signal.SIGSTOP)
        if waits:
            pool.await_stop(self.late)
        time.sleep(self.after_s + (COMES_S if making else 0.0))
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
        if waits and pool.remote and reports[self.late]["raised"] == "PeerDead":
            # The others stop waiting after a while for a remote rank to accept their notice of the cause.
            others.remove(self.late)
        complaints += not_raised(reports, others, {"GroupPoisoned"})
        blamed = {rank: reports[rank].get("peer") for rank in others if rank in alive(reports)}
        complaints += [f"rank {r} blamed rank {peer}" for r, peer in blamed.items() if peer != self.rank]
        return Outcome(self, reports, milliseconds, complaints)


STEPS_WHEN_SCARCE = 2
# Largest margin below the limit per kind, in descriptors or MiB, and the size of the buffer.
ROOM = {"descriptors": 10, "memory": 40, "threads": 48}
SIZES = {
    "descriptors": {},
    "memory": {"tokens": 128, "hidden": 4096},  # 10 MiB for each rank
    "threads": {"num_threads": 4},  # stacks are usually 8 MiB
}


@dataclass(frozen=True)
class Scarcity:
    """Either all ranks make the buffer, or all promptly raise a typed error. Then the limit is lifted, and all must
    work.

    Attributes:
        kind, room: see `resources.limited`.
    """

    rank: int
    kind: str
    room: int
    action = "limit"

    @classmethod
    def draw(cls, pace: random.Random, ranks: int) -> Scarcity:
        """Draw any rank, kind and margin."""
        kind = pace.choice(KINDS)
        return cls(pace.randrange(ranks), kind, pace.randint(0 if kind == "descriptors" else 2, ROOM[kind]))

    @property
    def text(self) -> str:
        """One-line description."""
        return f"limit of rank {self.rank}: {self.kind}, room for {self.room}"

    def run(self, pool: RankPool) -> Outcome[Scarcity]:
        """Run the trial. Milliseconds run from the rank's start of making the buffer until each rank raised."""
        ranks = range(pool.size)
        pool.session(ranks, STEPS_WHEN_SCARCE, {self.rank: {"limit": [self.kind, self.room]}}, sizes=SIZES[self.kind])
        reports = pool.reports(ranks, AT_ONCE_S)
        began = pool.board.began[self.rank]
        milliseconds = [1e3 * (report["at"] - began) for report in reports.values() if "at" in report]
        complaints = after_all(reports)
        if not all(report["raised"] == "nothing" for report in reports.values()):
            typed = {report["raised"] for report in reports.values() if report.get("typed")}
            complaints += not_raised(reports, ranks, typed - {"PeerTimeout"} or {"a typed error"})
            complaints += [f"rank {rank} has made a buffer" for rank, r in alive(reports).items() if r["made"]]
        complaints += steps_of_all(pool, ranks, STEPS_WHEN_SCARCE, 2 * PATIENCE_S)
        return Outcome(self, reports, milliseconds, complaints)


STEPS_OF_EVALUATION = 24
SIZE_OF_EVALUATION = {"tokens": 128, "hidden": 4096}  # 12 MiB of dispatched rows, and up to 2 MiB of combined rows


@dataclass(frozen=True)
class Evaluation:
    """Steps in changing modes, ending with a training step. No rank may raise, and all results must be right.

    Attributes:
        modes: keys of `worker.MODES`, in order.
    """

    modes: tuple[str, ...]
    action = "evaluate"

    @classmethod
    def draw(cls, pace: random.Random, ranks: int) -> Evaluation:
        """Draw a random order of modes that includes training."""
        modes = [pace.choice(list(MODES)) for _ in range(pace.randint(1, STEPS_OF_EVALUATION // 2 - 1))]
        return cls((*modes, "train"))

    @property
    def text(self) -> str:
        """One-line description."""
        return "evaluate " + ",".join(self.modes)

    def run(self, pool: RankPool) -> Outcome[Evaluation]:
        """Run the order at least twice."""
        ranks, steps = range(pool.size), STEPS_OF_EVALUATION - STEPS_OF_EVALUATION % len(self.modes)
        pool.session(ranks, steps, modes=self.modes, sizes=SIZE_OF_EVALUATION)
        reports = pool.reports(ranks, 2 * PATIENCE_S)
        complaints = not_raised(reports, ranks, {"nothing"}) + after_all(reports)
        return Outcome(self, reports, [], complaints + not_done(reports, steps))
