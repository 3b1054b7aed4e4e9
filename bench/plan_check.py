"""Measure how well the planner predicts this machine: calibrate on twelve shapes, then predict others of the same hour.

    python bench/plan_check.py --out bench/results/DIRECTORY --piece dispatch --piece combine ...
    python bench/plan_check.py --out bench/results/DIRECTORY

The first form measures what a piece's tables lack, in each of three rounds of new processes, and stops after
`--seconds`; the next call continues. A shape's time is the least of its rounds, or of rounds whose cores shared a cache
(`moe_rt.plan.points.least`). The second form predicts all that was measured, prints a line for each prediction, and
last one JSON line: errors, and how much two rounds of one shape differ. Layers and two emulated nodes have shapes of
their own for calibration.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import numpy as np

from moe_rt.errors import expect
from moe_rt.info import machine_card
from moe_rt.lab.bench.calibrate import ROUNDS, SHAPES, TIMED, USUAL, cases_of, machine_name, measure
from moe_rt.lab.bench.cases import Case
from moe_rt.plan.calibration import Calibration, Library, calibrate, save
from moe_rt.plan.points import COLUMNS, Row, least, read_rows

PARTS = ("calibrated", "predicted")
TOGETHER = 12  # cases that the same processes measure
# None of these is a shape of the calibration.
OTHERS = (
    (1, 2048, 2048, 4, 16, "uniform"),
    (1, 64, 7168, 8, 64, "uniform"),
    (2, 16, 256, 1, 8, "uniform"),
    (2, 16, 7168, 8, 64, "uniform"),
    (2, 128, 4096, 2, 8, "uniform"),
    (2, 256, 2048, 8, 128, "uniform"),
    (2, 256, 2880, 4, 128, "uniform"),
    (2, 1024, 1024, 6, 64, "uniform"),
    (2, 1024, 7168, 8, 256, "uniform"),
    (2, 2048, 2048, 2, 16, "uniform"),
    (2, 4096, 512, 4, 32, "uniform"),
    (2, 8192, 256, 2, 16, "uniform"),
    (2, 512, 2048, 4, 16, "lognormal:1"),
    (2, 1024, 1024, 1, 8, "lognormal:2"),
    (2, 512, 1024, 4, 16, "onehot"),
    (3, 128, 2048, 4, 24, "uniform"),
    (3, 512, 4096, 2, 12, "uniform"),
    (4, 64, 7168, 8, 64, "uniform"),
    (4, 1024, 1024, 2, 16, "uniform"),
    (4, 2048, 512, 4, 32, "uniform"),
    (4, 512, 2048, 4, 16, "lognormal:1.5"),
    (4, 128, 2048, 4, 16, "onehot"),
)
SHAPES_OF_LAYERS = (
    (2, 1, 1024, 4, 32, "uniform", 512),
    (2, 16, 1024, 4, 16, "uniform", 512),
    (2, 128, 512, 2, 8, "uniform", 1024),
    (2, 512, 1024, 4, 32, "uniform", 512),
    (2, 1024, 512, 2, 16, "uniform", 256),
    (2, 256, 2048, 2, 8, "uniform", 1024),
    (1, 256, 1024, 4, 16, "uniform", 512),
    (4, 64, 1024, 2, 16, "uniform", 512),
    (4, 512, 512, 4, 16, "uniform", 256),
    (3, 256, 512, 2, 12, "uniform", 512),
    (4, 256, 512, 2, 16, "uniform", 512),
)
OTHERS_OF_LAYERS = (
    (1, 512, 512, 2, 8, "uniform", 512),
    (1, 64, 2048, 4, 32, "uniform", 512),
    (2, 4, 2048, 4, 32, "uniform", 512),
    (2, 64, 1024, 8, 64, "uniform", 256),
    (2, 256, 1024, 4, 16, "uniform", 1024),
    (2, 512, 512, 1, 8, "uniform", 512),
    (2, 1024, 1024, 2, 16, "uniform", 512),
    (2, 2048, 256, 4, 32, "uniform", 256),
    (3, 128, 1024, 4, 24, "uniform", 512),
    (4, 128, 2048, 2, 16, "uniform", 512),
    (4, 256, 1024, 4, 32, "uniform", 256),
    (4, 512, 512, 2, 16, "uniform", 512),
)
SHAPES_OF_NODES = (
    (4, 1, 7168, 8, 64, "uniform"),
    (4, 64, 2048, 4, 16, "uniform"),
    (4, 512, 1024, 2, 16, "uniform"),
    (4, 256, 4096, 4, 32, "uniform"),
    (2, 128, 1024, 4, 16, "uniform"),
    (2, 512, 2048, 8, 32, "uniform"),
)
OTHERS_OF_NODES = (
    (4, 16, 2048, 4, 32, "uniform"),
    (4, 128, 7168, 8, 64, "uniform"),
    (4, 256, 1024, 2, 16, "uniform"),
    (4, 512, 2048, 4, 16, "lognormal:1"),
    (2, 256, 2048, 4, 16, "uniform"),
    (2, 1024, 1024, 2, 16, "uniform"),
)
OWN, GRADIENTS = TIMED, "moe_rt.lab.bench.contestants.moe:WithGradients"
# Variant, ops, nodes, iterations, and the shapes of each piece. A layer is measured with and without backward.
PIECES: dict[str, tuple[str, tuple[str, ...], int, int, Any, Any]] = {
    "dispatch": (OWN, ("dispatch",), 0, 20, SHAPES, OTHERS),
    "combine": (OWN, ("combine",), 0, 20, SHAPES, OTHERS),
    "pair": (OWN, ("pair",), 0, 20, SHAPES, OTHERS),
    "backward": (GRADIENTS, ("pair",), 0, 20, SHAPES, OTHERS),
    "layer": (OWN, ("layer",), 0, 10, SHAPES_OF_LAYERS, OTHERS_OF_LAYERS),
    "nodes": (OWN, ("dispatch", "combine"), 2, 10, SHAPES_OF_NODES, OTHERS_OF_NODES),
}


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--piece", "pieces", type=click.Choice(list(PIECES)), multiple=True, help="Measure this piece.")
@click.option("--rounds", default=ROUNDS, show_default=True, help="Times that each shape is measured.")
@click.option("--seconds", default=200.0, show_default=True, help="Time after which nothing new is measured.")
def main(out: Path, pieces: tuple[str, ...], rounds: int, seconds: float) -> None:
    """Measure what pieces lack, or predict what was measured."""
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    for piece in pieces:
        contestant, _, _, iters, *_ = PIECES[piece]
        settings = replace(USUAL, contestants=(contestant,))
        for batch in missing(out, piece, rounds):
            if time.monotonic() > ends:
                return click.echo(f"{piece}: not all is measured; run it again")
            lines = measure([case for _, case in batch], iters, lambda part: None, settings=settings)
            for part, case in batch:
                append(out / f"{part}-{piece}.csv", [line for line in lines if key_of(line) == key_of_case(case)])
        click.echo(f"{piece}: all is measured")
    return None if pieces else report(out)


def key_of_case(case: Case) -> str:
    """Return what distinguishes a case's lines from those of other cases of a piece."""
    routing = "router" if case.op == "layer" else case.routing
    sizes = (case.op, case.ranks, case.tokens, case.hidden, case.topk, case.experts, routing)
    return " ".join(map(str, sizes))


def key_of(line: dict[str, str]) -> str:
    """Return the same for a line."""
    names = ("op", "ep_size", "tokens_per_rank", "hidden", "topk", "experts")
    routing = line["notes"].split("routing=")[1].split(";")[0]
    return " ".join([*(line[name].removesuffix("+backward") for name in names), routing])


def missing(out: Path, piece: str, rounds: int) -> Iterator[list[tuple[str, Case]]]:
    """Yield batches of cases, with their parts, that have fewer lines than rounds: ranks and rounds apart."""
    _, ops, nodes, _, *shapes = PIECES[piece]
    each = 2 if piece == "layer" else 1  # lines of a case
    for turn in range(rounds):
        todo = []
        for part, chosen in zip(PARTS, shapes, strict=True):
            known = [key_of(line) for line in lines_of(out / f"{part}-{piece}.csv")]
            todo += [(part, c) for c in cases_of(chosen, ops, nodes) if known.count(key_of_case(c)) <= turn * each]
        todo.sort(key=lambda one: (one[1].ranks, one[1].op))
        for ranks in sorted({case.ranks for _, case in todo}):
            group = [one for one in todo if one[1].ranks == ranks]
            yield from (group[i : i + TOGETHER] for i in range(0, len(group), TOGETHER))


def lines_of(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, lines: list[dict[str, str]]) -> None:
    """Add lines to a table."""
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        writer.writerows(lines)


def between(rows: list[Row]) -> list[float]:
    """Return how much any two rounds of a shape differ, relatively."""
    groups: dict[Any, list[float]] = {}
    for row in rows:
        groups.setdefault((row.system.key, row.op, row.shape), []).append(row.latency_us)
    return [abs(a / b - 1) for group in groups.values() for a, b in combinations(group, 2)]


Found = tuple[str, Row, float, bool]  # op, measurement, signed relative error, and whether p5 to p95 holds it


def errors_of(known: list[Row], others: list[Row]) -> tuple[list[Found], list[Calibration]]:
    """Return the errors of predictions that rely on the least times of other shapes, and the calibrations."""
    fitted = calibrate(known, date=machine_card()["date"][:10])
    library, found = Library(fitted), list[Found]()
    calibrated = {(row.system.key, row.op) for row in known}
    for row in least(others):
        if (row.system.key, row.op) not in calibrated:
            continue
        guess = library.predict(row.system, row.op, row.shape)
        name = row.op + row.system.library.removeprefix("moe_rt")
        inside = guess.p5_us <= row.latency_us <= guess.p95_us
        found.append((name, row, guess.us / row.latency_us - 1, inside))
    return found, fitted


def figures_of(found: list[Found]) -> dict[str, float]:
    """Return the errors of some predictions as plain numbers."""
    errors = np.abs([error for _, _, error, _ in found])
    return {
        "predicted": len(found),
        "median": round(float(np.median(errors)), 4),
        "p95": round(float(np.quantile(errors, 0.95)), 4),
        "inside_p5_p95": round(float(np.mean([inside for *_, inside in found])), 3),
    }


def report(out: Path) -> None:
    """Predict every shape of the measured pieces from those for calibration."""
    known, others = (
        [row for path in sorted(out.glob(f"{part}-*.csv")) for _, row in read_rows(path)[0]] for part in PARTS
    )
    expect(bool(known and others), "pieces", "none", f"measured ones: --piece {', '.join(PIECES)}")
    found, fitted = errors_of(known, others)
    save(fitted, out / "calibration.json")
    ops: dict[str, list[Found]] = {}
    for one in found:
        name, row, error, _ = one
        ops.setdefault(name, []).append(one)
        x = row.shape
        sizes = f"R={x.ranks:g} T={x.tokens:g} H={x.hidden:g} K={x.topk:g} E={x.experts:g}, busiest {x.busiest:.2f}"
        click.echo(f"{name}, {sizes}: measured {row.latency_us:.1f} us, error {error:+.1%}")
    card, apart = machine_card(), between([*known, *others])
    figures = {
        "device": machine_name(card), "date": card["date"], "calibrated": len(least(known)), **figures_of(found),
        "median_between_rounds": round(float(np.median(apart)), 4) if apart else None,
        "p95_between_rounds": round(float(np.quantile(apart, 0.95)), 4) if apart else None,
        "ops": {name: figures_of(members) for name, members in ops.items()},
    }  # fmt: skip
    (out / "errors.json").write_text(json.dumps(figures, indent=1) + "\n")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
