"""Actions of `moe-rt chaos` with all ranks on this host."""

from __future__ import annotations

import random
from collections.abc import Callable

from moe_rt.chaos.evaluation import Evaluation
from moe_rt.chaos.freeze import Freeze
from moe_rt.chaos.injected_fault import POINTS_OF_ONE_HOST, STEPS, SURVIVORS_RAISE, InjectedFault
from moe_rt.chaos.interrupt import Interrupt
from moe_rt.chaos.outcome import Trial
from moe_rt.chaos.rank_pool import RankPool
from moe_rt.chaos.scarcity import Scarcity
from moe_rt.chaos.steps import OPS_OF_A_STEP

# The last op of a fault: survivors must notice in a later op.
LAST_OP = OPS_OF_A_STEP * (STEPS - 1)
OTHERS: dict[str, Callable[[random.Random, int], Trial[RankPool]]] = {
    "freeze": Freeze.draw,
    "interrupt": Interrupt.draw,
    "limit": Scarcity.draw,
    "evaluate": Evaluation.draw,
}
ACTIONS = (*SURVIVORS_RAISE, "heavy", *OTHERS)


def draw(action: str, pace: random.Random, ranks: int, stop_timeout_s: float) -> Trial[RankPool]:
    """Draw a trial. A fault has any compatible rank, point and op."""
    if action in OTHERS:
        return OTHERS[action](pace, ranks)
    at = "after_payload" if action == "corrupt" else pace.choice(POINTS_OF_ONE_HOST)
    return InjectedFault(
        pace.randrange(ranks),
        pace.randint(1, LAST_OP),
        at,
        "kill" if action == "heavy" else action,
        seconds=round(pace.uniform(0.0, 0.1), 3),
        ballast_mib=pace.randint(256, 1024) if action == "heavy" else 0,
        stop_timeout_s=stop_timeout_s,
    )
