"""One rank has too few descriptors, threads or bytes of address space to make a buffer."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moe_rt.chaos.outcome import Outcome, after_all, alive, not_raised, steps_of_all
from moe_rt.chaos.rank_pool import RankPool
from moe_rt.chaos.worker import PATIENCE_S
from moe_rt.testing.limits import KINDS

STEPS = 2
AT_ONCE_S = 20.0  # shorter than PATIENCE_S, the wait of a rank that is not notified
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
        kind, room: see `limits.limited`.
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
        pool.session(ranks, STEPS, {self.rank: {"limit": [self.kind, self.room]}}, sizes=SIZES[self.kind])
        reports = pool.reports(ranks, AT_ONCE_S)
        began = pool.board.began[self.rank]
        milliseconds = [1e3 * (report["at"] - began) for report in reports.values() if "at" in report]
        complaints = after_all(reports)
        if not all(report["raised"] == "nothing" for report in reports.values()):
            typed = {report["raised"] for report in reports.values() if report.get("typed")}
            complaints += not_raised(reports, ranks, typed - {"PeerTimeout"} or {"a typed error"})
            complaints += [f"rank {rank} has made a buffer" for rank, r in alive(reports).items() if r["made"]]
        complaints += steps_of_all(pool, ranks, STEPS, 2 * PATIENCE_S)
        return Outcome(self, reports, milliseconds, complaints)
