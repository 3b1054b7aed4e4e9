"""Rounds of chaos: random trials of groups that work, one after the other, and a count of what is left behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from moe_rt.chaos.evaluation import Evaluation
from moe_rt.chaos.freeze import Freeze
from moe_rt.chaos.injected_fault import STEPS, SURVIVORS_RAISE, InjectedFault
from moe_rt.chaos.interrupt import Interrupt
from moe_rt.chaos.outcome import Outcome, Trial
from moe_rt.chaos.rank_pool import RankPool
from moe_rt.chaos.scarcity import Scarcity
from moe_rt.chaos.steps import OPS_OF_A_STEP
from moe_rt.faults import POINTS
from moe_rt.testing.held import held, left_of

# There must be a later op in which survivors notice.
LAST_OP = OPS_OF_A_STEP * (STEPS - 1)
ACTIONS: dict[str, Callable[[random.Random, int], Trial]] = {
    "freeze": Freeze.draw,
    "interrupt": Interrupt.draw,
    "limit": Scarcity.draw,
    "evaluate": Evaluation.draw,
}
NAMES = (*SURVIVORS_RAISE, "heavy", *ACTIONS)


def draw(pace: random.Random, ranks: int, actions: Sequence[str], stop_timeout_s: float) -> Trial:
    """Any of the actions; of a fault any rank, point and op as far as they go together."""
    action = pace.choice(actions)
    if action in ACTIONS:
        return ACTIONS[action](pace, ranks)
    at = "after_payload" if action == "corrupt" else pace.choice(list(POINTS))
    return InjectedFault(
        pace.randrange(ranks),
        pace.randint(1, LAST_OP),
        at,
        "kill" if action == "heavy" else action,
        seconds=round(pace.uniform(0.0, 0.1), 3),
        ballast_mib=pace.randint(256, 1024) if action == "heavy" else 0,
        stop_timeout_s=stop_timeout_s,
    )


def chaos(
    ranks: int,
    rounds: int,
    seed: int,
    stop_timeout_s: float,
    progress: Callable[[int, Outcome[Any]], None],
    actions: Sequence[str],
) -> dict[str, Any]:
    """Runs the rounds and returns a document; its `complaints` are empty if nothing hung, leaked or went wrong."""
    pace, before, start = random.Random(seed), _held(), time.monotonic()
    outcomes: list[Outcome[Any]] = []
    with RankPool(ranks) as pool:
        for i in range(rounds):
            outcomes.append(draw(pace, ranks, actions, stop_timeout_s).run(pool))
            progress(i, outcomes[-1])
    seconds = time.monotonic() - start
    left = left_of(before, _held)
    complaints = [f"round {i}, {o.trial.text}: {text}" for i, o in enumerate(outcomes) for text in o.complaints]
    complaints += [f"{count} {name} left behind" for name, count in left.items() if count > 0]
    return {
        "ranks": ranks,
        "rounds": rounds,
        "seed": seed,
        "seconds_per_round": round(seconds / rounds, 3),
        "actions": {do: _summary([o for o in outcomes if o.trial.action == do]) for do in actions},
        "left_behind": left,
        "complaints": complaints,
        "wrong": [o.describe() for o in outcomes if o.complaints],
    }


def _summary(outcomes: list[Outcome[Any]]) -> dict[str, float]:
    times = [ms for outcome in outcomes for ms in outcome.milliseconds]
    noticed = {"median_ms": round(median(times), 2), "worst_ms": round(max(times), 2)} if times else {}
    return {"rounds": len(outcomes), **noticed}


def _held() -> dict[str, int]:
    """What could leak, here; every rank counts its own."""
    return held() | {"processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())}
