"""Trials on emulated nodes: ranks work by either route until a rank, a node or a link fails, or a rank misbehaves."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from moe_rt.config.options import Route
from moe_rt.lab.chaos.node_pool import NodePool
from moe_rt.lab.chaos.outcome import Outcome, after_all, not_done, not_raised, steps_of_all
from moe_rt.lab.chaos.rank_pool import ENDLESS, RankPool
from moe_rt.lab.chaos.worker import PATIENCE_S, TIGHT, Size

ROUTES: tuple[Route, ...] = ("flat", "two_level")
HANG_S = 4 * PATIENCE_S  # longer than the timeout of every wait


@dataclass(frozen=True)
class Moment:
    """Approximate step of a fault and the delay after it, and the sizes that ranks work with until then."""

    size: Size
    step: int
    after_s: float

    @classmethod
    def draw(cls, pace: random.Random) -> Moment:
        """Draw any moment. Some ranks have no tokens in some steps, for every size."""
        numbers = pace.choice([1, 8, 64]), pace.choice([32, 500, 4096]), pace.choice([1, 1, 2])
        size = Size(*numbers, pace.choice(ROUTES), depth=pace.choice([1, 2]))
        return cls(size, pace.randint(1, 8), round(pace.uniform(0.0, 0.1), 4))

    def __str__(self) -> str:
        s = self.size
        depth = f", depth {s.depth}" if s.depth > 1 else ""
        return f"{s.route} {s.tokens}x{s.hidden}, {s.num_threads} threads{depth}, step {self.step} + {self.after_s} s"

    def await_in(self, pool: NodePool, timeout_s: float = PATIENCE_S, **orders: Any) -> None:
        """Begin an endless session, and return at the moment of the fault."""
        ranks = range(pool.size)
        pool.session(ranks, ENDLESS, sizes=asdict(self.size), timeout_s=timeout_s, **orders)
        pool.await_steps(ranks, self.step)
        time.sleep(self.after_s)


def survived(pool: NodePool, trial: Any) -> Outcome[Any]:
    """Outcome of a fault that must change nothing: all ranks complete the session."""
    ranks = range(pool.size)
    last = pool.finish(ranks)
    reports = pool.reports(ranks, HANG_S)
    complaints = not_raised(reports, ranks, {"nothing"}) + after_all(reports)
    return Outcome(trial, reports, [], complaints + not_done(reports, last))


def judged(
    reports: dict[int, dict[str, Any]],
    ranks: Iterable[int],
    expected: set[str],
    causes: Callable[[int], Iterable[int]],
) -> list[str]:
    """Complaints about ranks that raised an unexpected error, or named none of the ranks that they may blame."""
    ranks = list(ranks)
    complaints = not_raised(reports, ranks, expected) + after_all(reports)
    for rank in ranks:
        message = reports[rank].get("message", "")
        if message and not any(names(reports[rank], cause) for cause in causes(rank)):
            complaints.append(f"rank {rank} blames none of ranks {list(causes(rank))}: {message}")
    return complaints


def names(report: dict[str, Any], rank: int) -> bool:
    """True if the first line of the error names the rank; later lines describe all ranks."""
    first_line = report.get("message", "").partition("\n")[0]
    return re.search(rf"\brank {rank}\b", first_line) is not None


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


STEPS = 12
# Errors of the rank itself, and of the other ranks.
RAISED: dict[str, tuple[set[str], set[str]]] = {
    "raise": ({"ValueError"}, {"GroupPoisoned"}),
    "close": ({"GroupClosed"}, {"GroupClosed", "GroupPoisoned"}),
    "abort": ({"GroupClosed"}, {"GroupPoisoned"}),
    "order": ({"CallOrderMismatch", "GroupPoisoned"}, {"CallOrderMismatch", "GroupPoisoned"}),
    "input": ({"nothing"}, {"nothing"}),
    "overflow": ({"nothing"}, {"nothing"}),
}
REFUSED = ("input", "overflow")


@dataclass(frozen=True)
class Misbehaviour:
    """All others must promptly raise the errors in RAISED and name the rank. For REFUSED actions, all ranks refuse the
    op and continue."""

    action: str
    rank: int
    moment: Moment

    @classmethod
    def draw(cls, action: str, pace: random.Random, ranks: int) -> Misbehaviour:
        """Draw any rank and any step."""
        rank, moment = pace.randrange(ranks), Moment.draw(pace)
        if action == "overflow":
            moment = replace(moment, size=Size(route=moment.size.route, capacity_factor=TIGHT))
        return cls(action, rank, moment)

    @property
    def text(self) -> str:
        """One-line description."""
        return f"{self.action} by rank {self.rank}, {self.moment}"

    def run(self, pool: RankPool) -> Outcome[Misbehaviour]:
        """Run the trial. It has no milliseconds, since the rank itself chooses the moment."""
        ranks, others = range(pool.size), [rank for rank in range(pool.size) if rank != self.rank]
        instead = [self.rank, self.moment.step, self.action]
        pool.session(ranks, STEPS, sizes=asdict(self.moment.size), instead=instead)
        reports = pool.reports(ranks, HANG_S)
        own, of_others = RAISED[self.action]
        complaints = not_raised(reports, [self.rank], own)
        if self.action in REFUSED:
            complaints += not_raised(reports, others, of_others) + not_done(reports, STEPS) + after_all(reports)
        else:
            # A rank that detects differing calls cannot know which rank is right, and the others are notified by it.
            found = [rank for rank in others if reports[rank]["raised"] == "CallOrderMismatch"]
            complaints += judged(reports, others, of_others, lambda _: [self.rank, *found])
        return Outcome(self, reports, [], complaints)
