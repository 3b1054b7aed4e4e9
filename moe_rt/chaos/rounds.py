"""Rounds of chaos: random faults into groups that work, one after the other, and a count of what is left behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from moe_rt.chaos.crew import Crew
from moe_rt.chaos.member import OPS_OF_A_STEP
from moe_rt.chaos.strike import Outcome, Strike, describe, run
from moe_rt.faults import POINTS

STEPS = 3
LAST_OP = OPS_OF_A_STEP * (STEPS - 1)  # there must be a later op in which survivors notice


def draw(pace: random.Random, ranks: int, actions: Sequence[str]) -> Strike:
    """Any rank, point and op, and any of the actions, as far as they go together."""
    do = pace.choice(actions)
    at = "after_payload" if do == "corrupt" else pace.choice(list(POINTS))
    return Strike(pace.randrange(ranks), pace.randint(1, LAST_OP), at, do, seconds=round(pace.uniform(0.0, 0.1), 3))


def chaos(
    ranks: int,
    rounds: int,
    seed: int,
    stop_timeout_s: float,
    progress: Callable[[int, Outcome], None],
    actions: Sequence[str],
) -> dict[str, Any]:
    """Runs the rounds and returns a document; its `complaints` are empty if nothing hung, leaked or went wrong."""
    pace, outcomes, before, start = random.Random(seed), [], _held(), time.monotonic()
    with Crew(ranks) as crew:
        for i in range(rounds):
            outcomes.append(run(crew, draw(pace, ranks, actions), STEPS, stop_timeout_s))
            progress(i, outcomes[-1])
    seconds = time.monotonic() - start
    left = {name: now - before[name] for name, now in _held().items()}
    complaints = [f"round {i}, {o.strike.spec}: {text}" for i, o in enumerate(outcomes) for text in o.complaints]
    complaints += [f"{count} {name} left behind" for name, count in left.items() if count > 0]
    return {
        "ranks": ranks,
        "rounds": rounds,
        "seed": seed,
        "seconds_per_round": round(seconds / rounds, 3),
        "actions": {do: _summary([o for o in outcomes if o.strike.do == do]) for do in actions},
        "left_behind": left,
        "complaints": complaints,
        "wrong": [describe(o) for o in outcomes if o.complaints],
    }


def _summary(outcomes: list[Outcome]) -> dict[str, float]:
    times = [ms for outcome in outcomes for ms in outcome.milliseconds]
    noticed = {"median_ms": round(median(times), 2), "worst_ms": round(max(times), 2)} if times else {}
    return {"rounds": len(outcomes), **noticed}


def names_in_dev_shm() -> set[str]:
    """Where a segment that was left behind would be, without what benchmarks and semaphores put there for a while."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("moe_rt_bench_", "sem."))}


def _held() -> dict[str, int]:
    """What could leak, here; every rank counts its own descriptors and segments."""
    return {
        "entries in /dev/shm": len(names_in_dev_shm()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    }
