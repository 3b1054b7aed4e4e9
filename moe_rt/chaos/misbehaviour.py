"""Trials of a rank that misuses the API: see `misdeeds`."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace

from moe_rt.chaos.misdeeds import TIGHT
from moe_rt.chaos.node_trials import HANG_S, Moment, judged
from moe_rt.chaos.outcome import Outcome, after_all, not_done, not_raised
from moe_rt.chaos.rank_pool import RankPool
from moe_rt.chaos.steps import Size

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
