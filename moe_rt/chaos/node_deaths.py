"""Ranks that are killed at any moment, singly or with their whole node, and ranks that are stopped by a signal."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from typing import Any

from moe_rt.chaos.node_pool import NodePool
from moe_rt.chaos.node_trials import HANG_S, Moment, judged, names, survived
from moe_rt.chaos.outcome import Outcome, not_raised, steps_of_all
from moe_rt.chaos.worker import PATIENCE_S

AFTERLIFE_STEPS = 5
STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a rank, of all ranks of a node, or of the node. Others must raise PeerDead, and work in a new group.

    Attributes:
        action: "kill", "ranks" or "node".
        rank: the killed rank, or one rank of the node.
    """

    action: str
    rank: int
    moment: Moment

    @property
    def text(self) -> str:
        """One-line description."""
        whom = {"kill": "rank", "ranks": "all ranks on the node of rank", "node": "the node of rank"}[self.action]
        return f"kill of {whom} {self.rank}, {self.moment}"

    def run(self, pool: NodePool) -> Outcome[Kill]:
        """Run the trial. Milliseconds run from the signal until each survivor raised."""
        node = pool.node_of[self.rank]
        dead = [self.rank] if self.action == "kill" else pool.ranks_of(node)
        survivors = [rank for rank in range(pool.size) if rank not in dead]
        self.moment.await_in(pool)
        sent = time.monotonic()
        if self.action == "node":
            pool.kill_node(node)
        else:
            for rank in dead:
                pool.send_signal(rank, signal.SIGKILL)
        reports = pool.reports(survivors, HANG_S) | pool.reports(dead, HANG_S)
        if self.action == "node":
            pool.cluster.reboot(node)
        milliseconds = [1e3 * (reports[rank]["at"] - sent) for rank in survivors if "at" in reports[rank]]
        complaints = judged(reports, survivors, {"PeerDead"}, lambda _: dead)
        complaints += not_raised(reports, dead, {"killed"}) + steps_of_all(pool, survivors, AFTERLIFE_STEPS, HANG_S)
        return Outcome(self, reports, milliseconds, complaints)


@dataclass(frozen=True)
class Stop:
    """SIGSTOP of a rank: briefly, which changes nothing; until the others have given it up; or permanently.

    Attributes:
        action: "pause" or "stop".
        seconds: duration of a pause.
        wakes: True if the rank that was given up continues while the others are in a newer group.
    """

    action: str
    rank: int
    moment: Moment
    seconds: float
    wakes: bool

    @property
    def text(self) -> str:
        """One-line description."""
        until = f"{self.seconds} s" if self.action == "pause" else "late" if self.wakes else "never"
        return f"stop of rank {self.rank} until {until}, {self.moment}"

    def run(self, pool: NodePool) -> Outcome[Any]:
        """Run the trial. It has no milliseconds."""
        if self.action == "pause":
            self.moment.await_in(pool)
            pool.send_signal(self.rank, signal.SIGSTOP)
            time.sleep(self.seconds)
            pool.send_signal(self.rank, signal.SIGCONT)
            return survived(pool, self)
        timeout_s = STOP_TIMEOUT_S
        while (outcome := self._given_up(pool, timeout_s)) is None:  # on a busy machine a wait may expire earlier
            timeout_s = min(10 * timeout_s, PATIENCE_S)
        return outcome

    def _given_up(self, pool: NodePool, timeout_s: float) -> Outcome[Any] | None:
        ranks = range(pool.size)
        self.moment.await_in(pool, timeout_s)
        pool.send_signal(self.rank, signal.SIGSTOP)
        pool.await_stop(self.rank)
        if not pool.stopped(self.rank) or (timeout_s < PATIENCE_S and pool.has_news(ranks)):
            pool.send_signal(self.rank, signal.SIGCONT)
            pool.reports(ranks, HANG_S)
            return None
        survivors = [rank for rank in ranks if rank != self.rank]
        reports = pool.reports(survivors, HANG_S)
        if not self.wakes:
            pool.kill(self.rank)
            complaints = steps_of_all(pool, survivors, AFTERLIFE_STEPS, HANG_S)
        else:
            pool.session(survivors, AFTERLIFE_STEPS)
            pool.send_signal(self.rank, signal.SIGCONT)
            newer = pool.reports(survivors, HANG_S)
            complaints = [f"in a newer group {text}" for text in not_raised(newer, survivors, {"nothing"})]
            reports[self.rank] = pool.report(self.rank, HANG_S)
            complaints += not_raised(reports, [self.rank], {"GroupPoisoned", "PeerDead", "GroupClosed", "PeerTimeout"})
        # A rank that accepts no data looks dead to the system. A rank that waits for its data is late itself, so a rank
        # whose wait expires earlier may name that one, but never itself. At least one rank names the right one.
        expected = {"PeerTimeout", "GroupPoisoned", "PeerDead", "GroupClosed"}
        complaints += judged(reports, survivors, expected, lambda rank: [peer for peer in ranks if peer != rank])
        if not any(names(reports[rank], self.rank) for rank in survivors):
            complaints.append(f"no rank names rank {self.rank}, which was stopped")
        return Outcome(self, reports, [], complaints)


def draw_kill(action: str, pace: random.Random, ranks: int) -> Kill:
    """Draw any rank and any moment."""
    return Kill(action, pace.randrange(ranks), Moment.draw(pace))


def draw_stop(action: str, pace: random.Random, ranks: int) -> Stop:
    """Draw any rank and any moment."""
    seconds = round(pace.uniform(0.05, 0.5), 3)
    return Stop(action, pace.randrange(ranks), Moment.draw(pace), seconds, wakes=pace.random() < 0.5)
