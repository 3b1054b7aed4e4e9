"""Measure how well the planner predicts this machine: calibrate on twelve shapes, then predict others of the same hour.

    python bench/plan_check.py --out bench/results/DIRECTORY --piece dispatch --piece combine ...
    python bench/plan_check.py --out bench/results/DIRECTORY

The first form measures pieces, each in a few minutes, and writes their tables. The second predicts all that was
measured, prints a line for each prediction, and last one JSON line with the errors. Two emulated nodes have four shapes
of their own for calibration, because their links are others. Run it on an idle machine: the errors contain what other
processes do to the measurements.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from moe_rt.errors import expect
from moe_rt.info import machine_card
from moe_rt.lab.bench.calibrate import SHAPES, cases_of, machine_name, measure_with_progress, write_lines
from moe_rt.plan.calibration import Library, calibrate, save
from moe_rt.plan.points import read_rows

PARTS = ("calibrated", "predicted")
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
    (3, 128, 2048, 4, 24, "uniform"),
    (3, 512, 4096, 2, 12, "uniform"),
    (4, 64, 7168, 8, 64, "uniform"),
    (4, 1024, 1024, 2, 16, "uniform"),
    (4, 2048, 512, 4, 32, "uniform"),
    (4, 512, 2048, 4, 16, "lognormal:1.5"),
)

# Two emulated nodes have shapes for calibration, and others.
SHAPES_OF_NODES = (
    (4, 1, 7168, 8, 64, "uniform"),
    (4, 64, 2048, 4, 16, "uniform"),
    (4, 512, 1024, 2, 16, "uniform"),
    (4, 256, 4096, 4, 32, "uniform"),
)
OTHERS_OF_NODES = (
    (4, 16, 2048, 4, 32, "uniform"),
    (4, 128, 7168, 8, 64, "uniform"),
    (4, 256, 1024, 2, 16, "uniform"),
    (4, 512, 2048, 4, 16, "lognormal:1"),
    (2, 256, 2048, 4, 16, "uniform"),
)
# Ops, nodes, and the shapes of each piece. A layer is measured with and without backward.
PIECES = {
    "dispatch": (("dispatch",), 0, SHAPES, OTHERS),
    "combine": (("combine",), 0, SHAPES, OTHERS),
    "pair": (("pair",), 0, SHAPES, OTHERS),
    "layer": (("layer",), 0, SHAPES, OTHERS),
    "nodes": (("dispatch", "combine"), 2, SHAPES_OF_NODES, OTHERS_OF_NODES),
}


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--piece", "pieces", type=click.Choice(list(PIECES)), multiple=True, help="Measure this piece.")
@click.option("--iters", type=click.IntRange(min=1))
def main(out: Path, pieces: tuple[str, ...], iters: int | None) -> None:
    """Measure pieces, or predict what was measured."""
    out.mkdir(parents=True, exist_ok=True)
    for piece in pieces:
        ops, nodes, *shapes = PIECES[piece]
        for part, chosen in zip(PARTS, shapes, strict=True):  # next to each other, so that the load is likely the same
            write_lines(out / f"{part}-{piece}.csv", measure_with_progress(cases_of(chosen, ops, nodes), iters))
    if not pieces:
        report(out)


def report(out: Path) -> None:
    """Predict every line of the measured pieces from those for calibration."""
    known, others = (
        [row for path in sorted(out.glob(f"{part}-*.csv")) for _, row in read_rows(path)[0]] for part in PARTS
    )
    expect(bool(known and others), "pieces", "none", f"measured ones: --piece {', '.join(PIECES)}")
    card = machine_card()
    fitted = calibrate(known, date=card["date"][:10])
    save(fitted, out / "calibration.json")
    library, errors, inside = Library(fitted), [], []
    for row in others:
        found, shape = library.predict(row.system, row.op, row.shape), row.shape
        errors.append(abs(found.us / row.latency_us - 1))
        inside.append(found.p5_us <= row.latency_us <= found.p95_us)
        sizes = f"R={shape.ranks:g} T={shape.tokens:g} H={shape.hidden:g} K={shape.topk:g} E={shape.experts:g}"
        times = f"measured {row.latency_us:.1f} us, predicted {found.us:.1f} us, error {errors[-1]:.1%}"
        click.echo(f"{row.system.library}, {row.op}, {sizes}, busiest {shape.busiest:.2f}: {times}")
    figures = {
        "device": machine_name(card), "date": card["date"], "calibrated": len(known), "predicted": len(errors),
        "median_absolute_error": round(float(np.median(errors)), 4),
        "p95_absolute_error": round(float(np.quantile(errors, 0.95)), 4),
        "inside_p5_p95": round(float(np.mean(inside)), 3),
    }  # fmt: skip
    (out / "errors.json").write_text(json.dumps(figures, indent=1) + "\n")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
