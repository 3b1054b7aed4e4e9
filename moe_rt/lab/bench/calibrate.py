"""The command `moe-rt calibrate`: fit the planner's formulas to a benchmark of this machine, or to a CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from moe_rt.config.placement import Placement
from moe_rt.config.tuning import Tuning
from moe_rt.errors import MoeRtError
from moe_rt.info import machine_card
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.moe import Timed
from moe_rt.lab.bench.expect import make_router
from moe_rt.lab.bench.inputs import make_inputs, route
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.lab.bench.run import Settings
from moe_rt.lab.bench.run import run as run_cases
from moe_rt.plan.calibration import Calibration, save
from moe_rt.plan.calibration import calibrate as fit_all
from moe_rt.plan.points import COLUMNS, Row, parse, read_rows
from moe_rt.plan.systems import CPU

# Ranks, tokens, hidden, topk, experts, routing: few shapes that separate latency, entries, bytes, ranks and skew.
SHAPES = (
    (2, 1, 7168, 8, 64, "uniform"),
    (2, 64, 2048, 4, 16, "uniform"),
    (2, 512, 2048, 4, 16, "uniform"),
    (2, 2048, 256, 8, 64, "uniform"),
    (2, 512, 7168, 8, 64, "uniform"),
    (2, 4096, 1024, 1, 8, "uniform"),
    (4, 256, 1024, 4, 16, "onehot"),
    (1, 512, 2048, 4, 16, "uniform"),
    (4, 16, 2048, 4, 16, "uniform"),
    (4, 512, 2048, 4, 16, "uniform"),
    (4, 256, 7168, 8, 64, "uniform"),
    (3, 1024, 1024, 2, 12, "uniform"),
)
OPS = ("dispatch", "combine", "pair")
ROUNDS = 3  # that calibrations measure all shapes


def cases_of(shapes: Sequence[tuple[Any, ...]], ops: Sequence[str] = OPS, nodes: int = 0) -> list[Case]:
    """Return a case for each shape and op.

    Args:
        shapes: ranks, tokens, hidden, topk, experts, routing, and for layers the experts' inner size.
        nodes: emulated ones over which ranks are spread; 0 for this host.
    """
    names = ("ranks", "tokens", "hidden", "topk", "experts", "routing", "intermediate")
    where: dict[str, Any] = {"nodes": nodes, "heap": "ucx"} if nodes else {}
    return [
        Case(name="plan", op=op, **where, **dict(zip(names, shape, strict=False)))  # type: ignore[arg-type]
        for op in ops
        for shape in shapes
    ]


def machine_name(card: dict[str, Any]) -> str:
    """Return the name under which calibrations of a machine are kept and found."""
    return f"{CPU}{card['cpu']}, {card['cores']} cores"


# Ranks keep freed memory and their caches, as in a loop that does nothing else.
TIMED = f"{Timed.__module__}:{Timed.__name__}"
USUAL = Settings(contestants=(TIMED,), iters=None, warmup=3, seed=0, malloc="recycle", cold=False)


def measure(
    cases: list[Case], iters: int | None, progress: Any, rounds: int = 1, settings: Settings = USUAL
) -> list[dict[str, str]]:
    """Benchmark moe_rt on cases, and return lines of measurements in the columns of COLUMNS.

    Args:
        rounds: times that all cases are measured, each in new processes, since a process keeps for its life the memory
            that it was given. Each round gives a line for each case and phase.
    """
    settings = replace(settings, iters=iters)
    lines = []
    for _ in range(rounds):
        document = run_cases(cases, settings, False, progress)
        for case, run in zip(cases, document["runs"], strict=True):
            for result in run["results"]:
                us = result["isolated_us"]["p50"]
                line = _line(case, result["phase"], us, document["machine"], settings.seed)
                lines.append(line | {"notes": f"{line['notes']}; line {_line_ns(run):.0f} ns"})
    return lines


def _line_ns(run: dict[str, Any]) -> float:
    """Return the median time to read a line that a peer has just written, in ns; 0 of one rank."""
    return float(np.median([ns for row in run["line_latency_ns"] for ns in row if ns > 0] or [0.0]))


def cores_apart(lines: list[dict[str, str]]) -> str:
    """Return a warning if the cores did not share a cache while lines were measured, which a virtual machine decides.

    The least time to read a peer's line counts: of a shape's rounds, those with a shared cache do (`least`).
    """
    read_ns = [float(found[1]) for line in lines if (found := re.search(r"; line (\d+) ns", line["notes"]))]
    least = min((ns for ns in read_ns if ns > 0), default=0.0)
    if least <= Tuning().near_ns:
        return ""
    return f"cores do not share a cache now ({least:.0f} ns a line): calibrate again later, to see if they ever do"


def _routed(case: Case, seed: int) -> str:
    """Return what the routes of a case's first inputs decide, as notes: the busiest rank, and ranks of a token.

    A layer routes its tokens by itself.
    """
    owner = np.array(Placement.contiguous(case.experts, case.ranks).ranks)
    router = make_router(case) if case.op == "layer" else None
    with torch.no_grad():
        ids = [
            route(case, seed, rank, 0) if router is None else router(make_inputs(case, seed, rank, 0).x)[0]
            for rank in range(case.ranks)
        ]
    owners = owner[torch.cat(ids).numpy()]
    loads = np.bincount(owners.reshape(-1), minlength=case.ranks)
    visited = np.mean([len(set(row)) for row in owners.tolist()])
    routing = case.routing if router is None else "router"
    return f"busiest={loads.max() / loads.mean():.3f}; to_ranks={visited:.3f}; routing={routing}"


def _line(case: Case, phase: str, us: float, card: dict[str, Any], seed: int) -> dict[str, str]:
    """Return one measurement; the library's name says that nodes are emulated, as their links are others."""
    products = f"; intermediate={case.intermediate}" if case.op == "layer" else ""
    nodes = case.nodes or 1
    where = f"; nodes={nodes}" if nodes > 1 else ""
    values = dict(
        source=f"moe-rt bench, commit {card['commit']}",
        library="moe_rt" if nodes == 1 else f"moe_rt, {nodes} emulated nodes",
        hardware=machine_name(card), nvlink_domain=case.ranks, mode="copies",
        op=case.op + ("+backward" if "backward" in phase else ""), ep_size=case.ranks,
        tokens_per_rank=case.tokens, hidden=case.hidden, topk=case.topk, experts=case.experts, dtype=case.dtype,
        latency_us=f"{us:.5g}", bandwidth_gbs="",
        notes=f"{_routed(case, seed)}{products}{where}; {card['date'][:16]}; load {card['load_average']}",
    )  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def measure_with_progress(
    cases: list[Case], iters: int | None, rounds: int = ROUNDS, settings: Settings = USUAL
) -> list[dict[str, str]]:
    """Measure while a bar shows how far it is."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=len(cases) * rounds)
        return measure(cases, iters, lambda part: bar.advance(task, part), rounds, settings)


def write_lines(path: Path, lines: list[dict[str, str]]) -> None:
    """Write measurements as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)


def _fitted(csv_file: Path | None, iters: int | None, keep: Path | None) -> tuple[list[Calibration], int]:
    """Return the calibrations of a table or of this machine, and how many lines were refused."""
    card = machine_card()
    if csv_file is not None:
        read, refused = read_rows(csv_file)
        rows: list[Row] = [row for _, row in read]
        for line, reason in refused:
            click.echo(f"line {line} refused: {reason}", err=True)
        return fit_all(rows, date=card["date"][:10]), len(refused)
    lines = measure_with_progress(cases_of(SHAPES), iters)
    if keep is not None:
        write_lines(keep, lines)
    if warning := cores_apart(lines):
        click.echo(warning, err=True)
    rows = [parse(line) for line in lines]
    source = f"moe-rt calibrate, moe_rt {card['moe_rt']}, commit {card['commit']}"
    return fit_all(rows, source=source, device=machine_name(card), date=card["date"][:10]), 0


def _write(fitted: list[Calibration], out: Path) -> None:
    files: dict[Path, list[Calibration]] = {}
    for one in fitted:
        name = re.sub(r"[^a-z0-9]+", "_", f"{one.library} {one.hardware}".lower()).strip("_")
        files.setdefault(out / f"{name}.json" if out.is_dir() else out, []).append(one)
    for path, members in files.items():
        save(members, path)


@click.command()
@click.option("--csv", "csv_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Fit this table.")
@click.option("--iters", type=click.IntRange(min=1), help="Iterations of each op; default: as moe-rt bench.")
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="Write the measurements there, as CSV.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("calibration.json"), show_default=True)
def calibrate(csv_file: Path | None, iters: int | None, keep: Path | None, out: Path) -> None:
    """Fit the planner's formulas to twelve shapes of this machine, or to a table of measurements.

    The file is read by `moe-rt plan --calibration FILE`. Residuals, device and date stand in it. If --out names a
    directory, each library and device has a file of its own there.
    """
    try:
        fitted, refused = _fitted(csv_file, iters, keep)
    except (MoeRtError, RankFailed) as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    _write(fitted, out)
    for one in fitted:
        click.echo(f"{one.median_error:7.1%} median, {one.p95_error:7.1%} p95 of the fit: {one.name}")
    click.echo(f"{out}: {len(fitted)} calibrations, {refused} lines refused")
