"""What is common to trials on emulated nodes: ranks that work by either route until something happens to them."""

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
HANG_S = 4 * PATIENCE_S  # who waits in vain says so before


@dataclass(frozen=True)
class Moment:
    """Near which step something happens, and how much later; and what ranks do until then."""

    size: Size
    step: int
    after_s: float

    @classmethod
    def draw(cls, pace: random.Random) -> Moment:
        """Any; some ranks have no tokens in some steps, whatever the size."""
        size = Size(pace.choice([1, 8, 64]), pace.choice([32, 500, 4096]), pace.choice([1, 1, 2]), pace.choice(ROUTES))
        return cls(size, pace.randint(1, 8), round(pace.uniform(0.0, 0.1), 4))

    def __str__(self) -> str:
        s = self.size
        return f"{s.route} {s.tokens}x{s.hidden}, {s.num_threads} threads, step {self.step} + {self.after_s} s"

    def await_in(self, pool: NodePool, timeout_s: float = PATIENCE_S, **orders: Any) -> None:
        """Begins a session without an end, and returns when it is the moment."""
        ranks = range(pool.size)
        pool.session(ranks, ENDLESS, sizes=asdict(self.size), timeout_s=timeout_s, **orders)
        pool.await_steps(ranks, self.step)
        time.sleep(self.after_s)


def survived(pool: NodePool, trial: Any) -> Outcome[Any]:
    """The outcome of what must change nothing: all ranks come to the end of the session."""
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
    """Complaints of ranks that raised something else than expected, or named none of those that a rank may blame."""
    ranks = list(ranks)
    complaints = not_raised(reports, ranks, expected) + after_all(reports)
    for rank in ranks:
        message = reports[rank].get("message", "")
        if message and not any(names(reports[rank], cause) for cause in causes(rank)):
            complaints.append(f"rank {rank} blames none of ranks {list(causes(rank))}: {message}")
    return complaints


def names(report: dict[str, Any], rank: int) -> bool:
    """Whether an error itself does, whatever its account of the others says behind the first line."""
    first_line = report.get("message", "").partition("\n")[0]
    return re.search(rf"\brank {rank}\b", first_line) is not None
