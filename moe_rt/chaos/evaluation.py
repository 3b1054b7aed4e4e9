"""Evaluation between training steps, on ranks whose large outputs are recycled memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moe_rt.chaos.outcome import Outcome, after_all, not_done, not_raised
from moe_rt.chaos.rank_pool import RankPool
from moe_rt.chaos.steps import MODES
from moe_rt.chaos.worker import PATIENCE_S

STEPS = 24
SIZE = {"tokens": 128, "hidden": 4096}  # 12 MiB of dispatched rows, and up to 2 MiB of combined rows


@dataclass(frozen=True)
class Evaluation:
    """Steps in changing modes, ending with a training step. No rank may raise, and all results must be right.

    Attributes:
        modes: keys of `steps.MODES`, in order.
    """

    modes: tuple[str, ...]
    action = "evaluate"

    @classmethod
    def draw(cls, pace: random.Random, ranks: int) -> Evaluation:
        """Draw a random order of modes that includes training."""
        modes = [pace.choice(list(MODES)) for _ in range(pace.randint(1, STEPS // 2 - 1))]
        return cls((*modes, "train"))

    @property
    def text(self) -> str:
        """One-line description."""
        return "evaluate " + ",".join(self.modes)

    def run(self, pool: RankPool) -> Outcome[Evaluation]:
        """Run the order at least twice."""
        ranks, steps = range(pool.size), STEPS - STEPS % len(self.modes)
        pool.session(ranks, steps, modes=self.modes, sizes=SIZE)
        reports = pool.reports(ranks, 2 * PATIENCE_S)
        complaints = not_raised(reports, ranks, {"nothing"}) + after_all(reports)
        return Outcome(self, reports, [], complaints + not_done(reports, steps))
