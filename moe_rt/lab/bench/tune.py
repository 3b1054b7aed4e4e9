"""Real runs as the judge of `moe-rt plan --tune --real`: one MoE layer of a model on this machine's CPU ranks.

Every configuration works through the same tokens, so their times compare. The last configurations that were measured
are not measured again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moe_rt.errors import MoeRtError, expect
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.base import Step
from moe_rt.lab.bench.contestants.moe import MoeRt
from moe_rt.lab.bench.expect import Expectation
from moe_rt.lab.bench.inputs import Inputs
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.lab.bench.run import Settings, run
from moe_rt.plan.models import Model
from moe_rt.plan.tune import Judge, Space

ITERS, MOST_RANKS = 6, 8


class OneThread(MoeRt):
    """moe_rt with one thread of each rank that moves rows; of a layer only the forward is timed."""

    name = "moe_rt_one_thread"

    def steps(self, inputs: Sequence[Inputs], expect: Expectation) -> list[Step]:
        return super().steps(inputs, expect)[:1]


class TwoThreads(OneThread):
    """moe_rt with two threads of each rank that move rows."""

    name = "moe_rt_two_threads"
    num_threads = 2


CONTESTANTS = {kind.num_threads: kind for kind in (OneThread, TwoThreads)}


def real_space(model: Model, ranks: int, tokens: int) -> Space:
    """Return the knobs of a layer on CPU ranks: EP size, heap, threads of a rank, and micro-batches.

    Args:
        ranks, tokens: the most ranks of this machine, and the tokens of each of them; fewer ranks take more.

    Raises:
        InvalidConfig: more than 8 ranks, or no size divides the experts.
    """
    expect(0 < ranks <= MOST_RANKS, "gpus", ranks, f"1 to {MOST_RANKS} ranks of this machine with --real")
    sizes = tuple(n for n in range(1, ranks + 1) if ranks % n == 0 and model.experts >= n)
    batches = tuple(n for n in (1, 2, 4, 8) if tokens % n == 0)
    return Space(
        {
            "ep_size": sizes,
            "heap": ("shm", "threads"),
            "num_threads": tuple(CONTESTANTS),
            "micro_batches": batches,
        }
    )


def real_judge(model: Model, ranks: int, tokens: int, space: Space, iters: int = ITERS) -> Judge:
    """Return the measured cost of a configuration: us of a layer's forward for all tokens of all ranks.

    A configuration whose ranks end early, for lack of memory for example, cannot run.
    """
    return lambda number: real_costs(model, ranks, tokens, space, [number], iters)[number]


def real_costs(
    model: Model, ranks: int, tokens: int, space: Space, numbers: Sequence[int], iters: int = ITERS
) -> dict[int, float]:
    """Return the costs of configurations that the same ranks can run; they are started once.

    Raises:
        InvalidConfig: the configurations differ in EP size or heap.
    """
    all_knobs: dict[int, dict[str, Any]] = {number: space.at(number) for number in numbers}
    started = {(knobs["ep_size"], knobs["heap"]) for knobs in all_knobs.values()}
    expect(len(started) == 1, "numbers", f"{len(started)} kinds of ranks", "configurations that the same ranks can run")
    batches = sorted({int(knobs["micro_batches"]) for knobs in all_knobs.values()})
    kinds = {int(knobs["num_threads"]): CONTESTANTS[int(knobs["num_threads"])] for knobs in all_knobs.values()}
    ((size, heap),) = started
    cases = [
        Case(
            name="tune", op="layer", ranks=int(size), heap=heap, tokens=ranks * tokens // int(size) // count,
            hidden=model.hidden, topk=model.topk, experts=model.experts, intermediate=model.intermediate,
        )
        for count in batches
    ]  # fmt: skip
    settings = Settings(
        contestants=tuple(f"{__name__}:{kind.__name__}" for kind in kinds.values()), iters=iters, warmup=1, seed=0,
        malloc="recycle", cold=False,
    )  # fmt: skip
    try:
        document = run(cases, settings, False, lambda part: None)
    except (MoeRtError, RankFailed):
        return dict.fromkeys(numbers, math.inf)
    found = {
        (count, result["contestant"]): float(result["isolated_us"]["p50"]) * count
        for count, record in zip(batches, document["runs"], strict=True)
        for result in record["results"]
    }
    return {
        number: found[int(knobs["micro_batches"]), kinds[int(knobs["num_threads"])].name]
        for number, knobs in all_knobs.items()
    }
