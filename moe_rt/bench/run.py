"""A whole benchmark: cases in, one document out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from moe_rt.bench.cases import Case
from moe_rt.bench.contestants import find
from moe_rt.bench.inputs import route
from moe_rt.bench.launch import find_mpirun, launch
from moe_rt.bench.machine import cache_bytes, cores, machine_card
from moe_rt.bench.measure import ROUNDS
from moe_rt.bench.rank import Job
from moe_rt.bench.results import rounded, slopes, summarise

SMALL_OP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        contestants: names, see `moe_rt.bench.contestants`.
        iters: isolated iterations, and free-running ones; None: 200 of small ops, 20 of large ones.
        warmup: untimed iterations before the first round.
        seed: of inputs and routing.
        malloc: "recycle" freed memory in every rank, or leave that to the "system".
    """

    contestants: tuple[str, ...]
    iters: int | None
    warmup: int
    seed: int
    malloc: Literal["recycle", "system"]


def sweep_tokens(case: Case, max_tokens: int) -> list[Case]:
    """One token, which shows the latency floor, then 64 tokens and on in powers of two."""
    tokens = [1] + [2**n for n in range(6, 32) if 2**n <= max_tokens]
    return [replace(case, name=f"{case.name}-T{t}", tokens=t) for t in tokens]


def run(
    cases: list[Case], settings: Settings, sweep: bool, progress: Callable[[int, int, str], None]
) -> dict[str, Any]:
    """Measures all cases and returns the document that `moe-rt bench` prints.

    Args:
        sweep: the cases are one case at growing numbers of tokens, the first being the floor.
        progress: called with turns done, turns of all cases, and what runs now.

    Raises:
        InvalidConfig: before any rank is started, for what can be seen here.
        RankFailed: when a rank ends early.
    """
    for name in settings.contestants:
        find(name)
    for case in cases:
        route(replace(case, tokens=1), settings.seed, 0, 0)
    mpirun = find_mpirun() if "mpi" in settings.contestants else None
    card = machine_card()
    turns = _Turns(progress, len(cases) * len(settings.contestants) * ROUNDS)
    runs: list[dict[str, Any]] = []
    for key, group in groupby(cases, key=lambda case: (case.ranks, case.heap, _iters(case, settings))):
        same = list(group)
        turns.label = same[0].name if len(same) == 1 else f"{len(same)} cases of {key[0]} ranks"
        job = Job(
            cases=same,
            contestants=list(settings.contestants),
            cores=cores(),
            cache_bytes=cache_bytes(),
            iters=key[2],
            warmup=settings.warmup,
            seed=settings.seed,
        )
        runs += map(summarise, launch(job, mpirun, settings.malloc == "recycle", turns.advance))
    document = {
        "machine": card,
        "settings": {**vars(settings), "mpirun": mpirun},
        "runs": runs,
    }
    if sweep:
        document["slopes"] = slopes(runs)
    return rounded(document)


def _iters(case: Case, settings: Settings) -> int:
    if settings.iters is not None:
        return settings.iters
    return 200 if case.tokens * case.topk * case.row_bytes < SMALL_OP_BYTES else 20


class _Turns:
    """Counts the turns of all contestants in all rounds."""

    def __init__(self, progress: Callable[[int, int, str], None], total: int) -> None:
        self._progress, self._total, self._done, self.label = progress, total, 0, ""

    def advance(self, turns: int) -> None:
        self._done += turns
        self._progress(self._done, self._total, self.label)
