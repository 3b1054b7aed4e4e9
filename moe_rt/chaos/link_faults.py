"""Faults of a node's link: down for a short or a long time, slow, or lossy."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from moe_rt.chaos.node_pool import NodePool
from moe_rt.chaos.node_trials import HANG_S, Moment, judged, survived
from moe_rt.chaos.outcome import Outcome, after_all, not_raised, steps_of_all

AFTERLIFE_STEPS = 5
# Durations in seconds. UCX gives up a peer that has not answered for two seconds (docs/howto/cluster.md), and TCP
# retransmits after 0.2, 0.6 and 1.4.
LONGEST_BLINK_S = 1.0
SECONDS = {"blink": (0.05, 0.5), "flap": (1.0, 4.0), "slow": (0.2, 1.0), "lossy": (0.2, 0.8)}
SLOW, SHORT_QUEUE = ("1mbit", "5mbit", "20mbit"), "1ms"
CUT_TIMEOUT_S = 12.0  # a link that is down must be noticed much earlier, even without traffic
LOST = {"PeerDead", "GroupPoisoned", "GroupClosed"}


@dataclass(frozen=True)
class LinkFault:
    """A link fault. "cut" must give PeerDead on both sides; "blink", "slow" and "lossy" nothing; "flap" either.

    Attributes:
        action: "cut" lasts until all have raised. After it, or after a "flap", the ranks must work in a new group.
        rate: rate while the link is slow or lossy.
    """

    action: str
    node: int
    moment: Moment
    seconds: float
    rate: str

    @property
    def text(self) -> str:
        """One-line description."""
        lasts = "" if self.action == "cut" else f" for {self.seconds} s"
        at = f" at {self.rate}" if self.action in ("slow", "lossy") else ""
        return f"{self.action} of node {self.node}{lasts}{at}, {self.moment}"

    def run(self, pool: NodePool) -> Outcome[Any]:
        """Run the trial. Milliseconds run from the cut until each rank raised."""
        if self.action == "cut":
            return self._cut(pool)
        self.moment.await_in(pool)
        begin = time.monotonic()
        self._begin(pool)
        time.sleep(self.seconds)
        self._end(pool)
        seconds = time.monotonic() - begin
        if self.action == "flap":
            return self._flapped(pool)
        if self.action == "blink" and seconds > LONGEST_BLINK_S:  # on a busy machine; the result is then meaningless
            flapped = self._flapped(pool)
            return flapped if flapped.complaints else self.run(pool)
        return survived(pool, self)

    def _begin(self, pool: NodePool) -> None:
        if self.action in ("slow", "lossy"):
            pool.cluster.limit(self.node, self.rate, *([SHORT_QUEUE] if self.action == "lossy" else []))
        else:
            pool.cluster.cut(self.node)

    def _end(self, pool: NodePool) -> None:
        if self.action in ("slow", "lossy"):
            pool.cluster.unlimit(self.node)
        else:
            pool.cluster.mend(self.node)

    def _cut(self, pool: NodePool) -> Outcome[LinkFault]:
        ranks, here = range(pool.size), pool.ranks_of(self.node)
        there = [rank for rank in ranks if rank not in here]
        self.moment.await_in(pool, CUT_TIMEOUT_S)
        start = time.monotonic()
        self._begin(pool)
        reports = pool.reports(ranks, HANG_S)
        self._end(pool)
        milliseconds = [1e3 * (report["at"] - start) for report in reports.values() if "at" in report]
        complaints = judged(reports, ranks, {"PeerDead"}, lambda rank: there if rank in here else here)
        complaints += steps_of_all(pool, ranks, AFTERLIFE_STEPS, HANG_S)
        return Outcome(self, reports, milliseconds, complaints)

    def _flapped(self, pool: NodePool) -> Outcome[LinkFault]:
        """The link may have been down long enough for some connections, and not for others."""
        ranks = range(pool.size)
        pool.finish(ranks)
        reports = pool.reports(ranks, HANG_S)
        complaints = not_raised(reports, ranks, LOST | {"nothing"}) + after_all(reports)
        complaints += steps_of_all(pool, ranks, AFTERLIFE_STEPS, HANG_S)
        return Outcome(self, reports, [], complaints)


def draw_link_fault(action: str, pace: random.Random, nodes: int) -> LinkFault:
    """Draw a fault of any node at any moment."""
    seconds = round(pace.uniform(*SECONDS.get(action, (0.0, 0.0))), 3)
    return LinkFault(action, pace.randrange(nodes), Moment.draw(pace), seconds, pace.choice(SLOW))
