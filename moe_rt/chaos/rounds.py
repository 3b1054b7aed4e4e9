"""Rounds of chaos: random trials of working groups in sequence, and a count of leaked resources."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from moe_rt.chaos.outcome import Outcome, Trial
from moe_rt.chaos.rank_pool import RankPool
from moe_rt.nodes.cluster import NETNS
from moe_rt.testing.held import held, left_of

Pool = TypeVar("Pool", bound=RankPool)
Draw = Callable[[str, random.Random], Trial[Pool]]  # called with an action's name


def chaos(
    make_pool: Callable[[], Pool],
    draw: Draw[Pool],
    actions: Sequence[str],
    rounds: int,
    seed: int,
    progress: Callable[[int, Outcome[Any]], None],
) -> dict[str, Any]:
    """Run the rounds and return a document. Its `complaints` are empty if nothing hung, leaked or went wrong."""
    pace, before, start = random.Random(seed), _held(), time.monotonic()
    outcomes: list[Outcome[Any]] = []
    with make_pool() as pool:
        for i in range(rounds):
            outcomes.append(draw(pace.choice(actions), pace).run(pool))
            progress(i, outcomes[-1])
        kept = pool.kept()
    seconds = time.monotonic() - start
    left = left_of(before, _held) | kept
    complaints = [f"round {i}, {o.trial.text}: {text}" for i, o in enumerate(outcomes) for text in o.complaints]
    complaints += [f"{count} {name} left behind" for name, count in left.items() if count > 0]
    return {
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
    """Count resources of this process that could leak; every rank counts its own."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    namespaces = list(NETNS.glob(f"*_{os.getpid()}-*"))
    return held() | {"processes": len(children), "namespaces": len(namespaces)}
