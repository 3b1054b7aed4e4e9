"""A whole benchmark: cases in, one document out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from moe_rt.errors import InvalidConfig
from moe_rt.info import cores, machine_card
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants import find
from moe_rt.lab.bench.inputs import route
from moe_rt.lab.bench.launch import find_mpirun, launch
from moe_rt.lab.bench.rank import Job
from moe_rt.lab.bench.results import rounded, slopes, summarise
from moe_rt.lab.cluster.cluster import require_rights

SMALL_OP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        contestants: names, see `moe_rt.lab.bench.contestants`.
        iters: number of isolated iterations, and of free-running ones; None: 200 of small ops, 20 of large ones.
        warmup: untimed iterations before the first round.
        seed: seed of inputs and routing.
        malloc: "recycle" freed memory in every rank, or leave that to the "system".
        cold: True if caches are filled with other data before each isolated iteration.
        trace: True if moe_rt's layers are traced; each run then has its events as `trace`.
    """

    contestants: tuple[str, ...]
    iters: int | None
    warmup: int
    seed: int
    malloc: Literal["recycle", "system"]
    cold: bool
    trace: bool = False


def sweep_tokens(case: Case, max_tokens: int) -> list[Case]:
    """One token, which shows the latency floor, then powers of two from 64 tokens."""
    tokens = [1] + [2**n for n in range(6, 32) if 2**n <= max_tokens]
    return [replace(case, name=f"{case.name}-T{t}", tokens=t) for t in tokens]


def run(cases: list[Case], settings: Settings, sweep: bool, progress: Callable[[float], None]) -> dict[str, Any]:
    """Measure all cases and return the document that `moe-rt bench` prints.

    Args:
        sweep: the cases are one case at increasing numbers of tokens; the first is the floor.
        progress: called with the fraction of a case completed since the last call.

    Raises:
        InvalidConfig, MissingPackage: for errors found before any rank is started.
        RankFailed: a rank ended early.
    """
    names = [find(name).name for name in settings.contestants]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidConfig(f"contestants: got {', '.join(repeated)} more than once, expected distinct names")
    for case in cases:
        route(replace(case, tokens=1), settings.seed, 0, 0)
        _require_gpus(case)
    if any(case.nodes for case in cases):
        require_rights()
    with_mpi = "mpi" in settings.contestants and any(case.as_processes and not case.on_gpu for case in cases)
    mpirun = find_mpirun() if with_mpi else None
    card = machine_card()
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, case in enumerate(cases):
        groups.setdefault((case.ranks, case.heap, case.nodes, case.rate, _iters(case, settings)), []).append(place)
    measured: dict[int, dict[str, Any]] = {}  # by position, since the same case may be given twice
    for group in groups.values():  # ranks are started once for all cases that they can run
        job = Job(
            cases=[cases[place] for place in group],
            contestants=list(settings.contestants),
            cores=cores(),
            iters=_iters(cases[group[0]], settings),
            warmup=settings.warmup,
            seed=settings.seed,
            cold=settings.cold,
            trace=settings.trace,
        )
        records = launch(job, mpirun, settings.malloc == "recycle", progress)
        measured.update(zip(group, map(summarise, records), strict=True))
    runs = [measured[place] for place in range(len(cases))]
    started_by = "python" if mpirun is None else "mpirun"
    shown = {name: value for name, value in vars(settings).items() if name != "trace"}
    document = {"machine": card, "settings": {**shown, "started_by": started_by}, "runs": runs}
    if sweep:
        document["slopes"] = slopes(runs)
    return rounded(document)


def _require_gpus(case: Case) -> None:
    needed = (case.ranks if case.as_processes else 1) if case.on_gpu else 0
    there = torch.cuda.device_count() if needed else 0
    if there < needed:
        others = "loopback (one GPU for all ranks), shm or threads" if there else "shm or threads"
        raise InvalidConfig(f"heap: got {case.heap!r} for {case.ranks} ranks and {there} GPUs, expected {others}")
    if needed and not case.as_processes:
        reserved, free = case.ranks * case.reserved_bytes, torch.cuda.mem_get_info()[0]
        if reserved > free:
            got = f"{case.ranks} ranks on one GPU that need {reserved / 2**30:.1f} GiB for rows"
            raise InvalidConfig(
                f"case: got {got}, expected at most the {free / 2**30:.1f} GiB that are free; use --tokens"
            )


def _iters(case: Case, settings: Settings) -> int:
    if settings.iters is not None:
        return settings.iters
    return 200 if case.tokens * case.topk * case.row_bytes < SMALL_OP_BYTES else 20
