"""Measure how well the planner predicts this machine: calibrate on twelve shapes, then predict others of the same hour.

    python bench/plan_check.py --out bench/results/DIRECTORY

It writes both tables of measurements and the calibration there, prints a line for each prediction, and last one JSON
line with the errors. Run it on an idle machine: the errors contain what other processes do to the measurements.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from moe_rt.info import machine_card
from moe_rt.lab.bench.calibrate import OPS, SHAPES, cases_of, machine_name, measure_with_progress, write_lines
from moe_rt.plan.calibration import Library, calibrate, save
from moe_rt.plan.points import parse

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


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--iters", type=click.IntRange(min=1))
def main(out: Path, iters: int | None) -> None:
    """Calibrate, predict and compare."""
    out.mkdir(parents=True, exist_ok=True)
    card = machine_card()
    # One run, so that a change of the machine's load between both tables is unlikely.
    lines = measure_with_progress(cases_of([*SHAPES, *OTHERS]), iters)
    seen = [i % (len(SHAPES) + len(OTHERS)) < len(SHAPES) for i in range(len(lines))]
    known = [line for line, is_seen in zip(lines, seen, strict=True) if is_seen]
    others = [line for line, is_seen in zip(lines, seen, strict=True) if not is_seen]
    source = f"bench/plan_check.py, commit {card['commit']}"
    fitted = calibrate(
        [parse(line) for line in known], source=source, device=machine_name(card), date=card["date"][:10]
    )
    write_lines(out / "calibrated.csv", known)
    write_lines(out / "predicted.csv", others)
    save(fitted, out / "calibration.json")
    library, errors, inside = Library(fitted), [], []
    for line in others:
        row = parse(line)
        found = library.predict(row.system, row.op, row.shape)
        errors.append(abs(found.us / row.latency_us - 1))
        inside.append(found.p5_us <= row.latency_us <= found.p95_us)
        sizes = " ".join(line[name] for name in ("op", "ep_size", "tokens_per_rank", "hidden", "topk", "experts"))
        click.echo(f"{sizes}: measured {row.latency_us:.1f} us, predicted {found.us:.1f} us, error {errors[-1]:.1%}")
    figures = {
        "device": machine_name(card), "date": card["date"], "load": card["load_average"], "calibrated": len(SHAPES),
        "ops": OPS, "predicted": len(errors), "median_absolute_error": round(float(np.median(errors)), 4),
        "p95_absolute_error": round(float(np.quantile(errors, 0.95)), 4), 
        "inside_p5_p95": round(float(np.mean(inside)), 3),
    }  # fmt: skip
    (out / "errors.json").write_text(json.dumps(figures, indent=1) + "\n")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
