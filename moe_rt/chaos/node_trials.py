"""Common parts of trials on emulated nodes: ranks that work by either route until a fault is injected."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from moe_rt.chaos.node_pool import NodePool
from moe_rt.chaos.outcome import Outcome, after_all, not_done, not_raised
from moe_rt.chaos.rank_pool import ENDLESS
from moe_rt.chaos.steps import Size
from moe_rt.chaos.worker import PATIENCE_S
from moe_rt.config.options import Route

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
        size = Size(pace.choice([1, 8, 64]), pace.choice([32, 500, 4096]), pace.choice([1, 1, 2]), pace.choice(ROUTES))
        return cls(size, pace.randint(1, 8), round(pace.uniform(0.0, 0.1), 4))

    def __str__(self) -> str:
        s = self.size
        return f"{s.route} {s.tokens}x{s.hidden}, {s.num_threads} threads, step {self.step} + {self.after_s} s"

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
