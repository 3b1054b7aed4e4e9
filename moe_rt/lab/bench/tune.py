"""Real runs as the judge of `moe-rt plan --tune --real`: one MoE layer of a model on this machine's CPU ranks.

Every configuration works through the same tokens, so their times compare. The last configurations that were measured
are not measured again.
"""

from __future__ import annotations

import math
from typing import Any

from moe_rt.errors import MoeRtError, expect
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.moe import MoeRt
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.lab.bench.run import Settings, run
from moe_rt.plan.models import Model
from moe_rt.plan.tune import Judge, Space

ITERS, MOST_RANKS = 6, 8


class TwoThreads(MoeRt):
    """moe_rt with two threads of each rank that move rows."""

    name = "moe_rt_two_threads"
    num_threads = 2


CONTESTANTS = {1: "moe_rt", 2: f"{__name__}:{TwoThreads.__name__}"}


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

    def judge(number: int) -> float:
        knobs: dict[str, Any] = space.at(number)
        batches = int(knobs["micro_batches"])
        case = Case(
            name="tune", op="layer", ranks=int(knobs["ep_size"]), heap=knobs["heap"],
            tokens=ranks * tokens // int(knobs["ep_size"]) // batches, hidden=model.hidden, topk=model.topk,
            experts=model.experts, intermediate=model.intermediate,
        )  # fmt: skip
        settings = Settings(
            contestants=(CONTESTANTS[int(knobs["num_threads"])],), iters=iters, warmup=1, seed=0, malloc="recycle",
            cold=False,
        )  # fmt: skip
        try:
            document = run([case], settings, False, lambda part: None)
        except (MoeRtError, RankFailed):
            return math.inf
        forward = next(r for r in document["runs"][0]["results"] if r["phase"] == "forward")
        return float(forward["isolated_us"]["p50"]) * batches

    return judge
