"""Comparison of predictions with a table of published measurements, by source.

`python -m moe_rt.planner.score FILE.csv` prints a table and, last, one JSON line. It exits with 1 if more than 10 % of
the rows are refused.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from moe_rt.errors import InvalidConfig
from moe_rt.plan.calibration import Library, published
from moe_rt.plan.distinct import Array
from moe_rt.plan.points import Row, read_rows

MOST_REFUSED = 0.1


@dataclass(frozen=True)
class Scored:
    """One predicted row.

    Attributes:
        error: relative error of the median.
        inside: the measurement is within p5 and p95.
        guessed: nothing with such links or such an algorithm is calibrated.
    """

    row: Row
    error: float
    inside: bool
    guessed: bool


def score(path: Path, library: Library | None = None) -> tuple[list[Scored], list[tuple[int, str]]]:
    """Predict every row of a table.

    Returns:
        What was predicted, and (line, reason) of each row that was refused.

    Raises:
        InvalidConfig: the file lacks a column.
    """
    known = library or Library(published().calibrations, guess=True)
    rows, refused = read_rows(path, guess=True)
    scored = []
    for line, row in rows:
        try:
            estimate = known.predict(row.system, row.op, row.shape)
        except InvalidConfig as error:
            refused.append((line, error.args[0]))
            continue
        inside = estimate.p5_us <= row.latency_us <= estimate.p95_us
        scored.append(Scored(row, abs(estimate.us / row.latency_us - 1), inside, "guessed" in estimate.basis))
    return scored, sorted(refused)


def summary(scored: list[Scored], refused: list[tuple[int, str]]) -> dict[str, Any]:
    """Return the figures of the JSON line."""
    errors = np.array([one.error for one in scored])
    total = len(scored) + len(refused)
    share = len(refused) / total if total else 1.0
    figures = {
        "rows": total,
        "predicted": len(scored),
        "refused": len(refused),
        "guessed": sum(one.guessed for one in scored),
        "refused_share": round(share, 4),
        "median_absolute_error": _quantile(errors, 0.5),
        "p95_absolute_error": _quantile(errors, 0.95),
        "inside_p5_p95": round(float(np.mean([one.inside for one in scored])), 4) if scored else None,
    }
    return figures | {"failed": share > MOST_REFUSED}


def _quantile(errors: Array, q: float) -> float | None:
    return round(float(np.quantile(errors, q)), 5) if len(errors) else None


def table(scored: list[Scored]) -> list[str]:
    """Return lines of errors by source, library, hardware, mode and op."""
    groups: dict[tuple[str, str], list[Scored]] = {}
    for one in scored:
        system = one.row.system
        name = f"{system.library}, {system.hardware}, {system.mode}, {one.row.op}"
        groups.setdefault((one.row.source, name), []).append(one)
    lines, last = [f"{'rows':>6} {'median':>8} {'p95':>8} {'in p5-p95':>9}  system"], ""
    for (source, name), members in sorted(groups.items()):
        if source != last:
            lines.append(source)
            last = source
        errors = np.array([one.error for one in members])
        inside = np.mean([one.inside for one in members])
        figures = f"{len(members):6} {np.median(errors):8.1%} {np.quantile(errors, 0.95):8.1%} {inside:9.0%}"
        lines.append(f"{figures}  {name}{', guessed' if members[0].guessed else ''}")
    return lines


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Score predictions against the measurements of FILE, a CSV with the columns of moe_rt.plan.points.COLUMNS."""
    try:
        scored, refused = score(file)
    except InvalidConfig as error:
        raise click.ClickException(str(error)) from error
    for line in table(scored):
        click.echo(line)
    for reason, count in Counter(reason for _, reason in refused).most_common():
        numbers = [str(line) for line, why in refused if why == reason]
        click.echo(f"refused {count}: {reason} (lines {', '.join(numbers[:20])}{', ...' if count > 20 else ''})")
    figures = summary(scored, refused)
    click.echo(json.dumps(figures))
    sys.exit(figures["failed"])
