"""Measure how well the planner predicts published rows that its fit did not see: parts of a table are left out in turn.

    python bench/plan_folds.py TABLE.csv

It prints, for each way of leaving out, the rows, the median and 95th percentile of the relative error, and the share of
measurements between p5 and p95. No time is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

import click
import numpy as np

from moe_rt.errors import InvalidConfig
from moe_rt.plan.calibration import Library, calibrate
from moe_rt.plan.points import Row, read_rows

DATE = "left out"


def fold_of(kind: str, rows: list[Row], seed: int) -> list[Hashable]:
    """Return the fold of each row; rows of fold None are never left out."""
    counts = sorted({row.shape.tokens for row in rows})
    random = np.random.default_rng(seed).integers(0, 5, len(rows)).tolist()
    values: dict[str, Callable[[Row], float]] = {
        "bytes": lambda row: row.shape.row_bytes,
        "ep": lambda row: row.shape.ranks,
        "sms": lambda row: row.shape.sms,
    }
    several = {name: several_of(rows, value) for name, value in values.items()}

    def one(number: int, row: Row) -> Hashable:
        shape, name = row.shape, (row.system.key, row.op)
        if kind == "random":
            return random[number]
        if kind == "tokens":
            return counts.index(shape.tokens) % 3
        if kind == "shapes":
            key = (row.system.family, shape.hidden, shape.topk, shape.experts)
            return key if row.system.family in ("direct", "channels") and shape.hidden != 7168 else None
        if kind == "source":
            return row.source
        value = values[kind](row)
        return (*name, value) if name in several[kind] and row.system.family != "pairs" else None

    return [one(number, row) for number, row in enumerate(rows)]


def several_of(rows: list[Row], value: Callable[[Row], float]) -> set[tuple[str, str]]:
    """Return the systems and ops that were measured at several values."""
    seen: dict[tuple[str, str], set[object]] = {}
    for row in rows:
        seen.setdefault((row.system.key, row.op), set()).add(value(row))
    return {name for name, values in seen.items() if len(values) > 1}


KINDS = ("random", "tokens", "shapes", "bytes", "ep", "sms", "source")


@click.command()
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the random folds.")
def main(table: Path, kinds: tuple[str, ...], seed: int) -> None:
    """Leave out parts of TABLE in turn, fit the rest, and predict them."""
    rows = [row for _, row in read_rows(table)[0]]
    for kind in kinds:
        folds = fold_of(kind, rows, seed)
        errors, inside, refused = [], [], 0
        for left_out in {fold for fold in folds if fold is not None}:
            seen = [row for row, fold in zip(rows, folds, strict=True) if fold != left_out]
            library = Library(calibrate(seen, date=DATE))
            for row in (row for row, fold in zip(rows, folds, strict=True) if fold == left_out):
                try:
                    found = library.predict(row.system, row.op, row.shape)
                except InvalidConfig:
                    refused += 1
                    continue
                errors.append(abs(found.us / row.latency_us - 1))
                inside.append(found.p5_us <= row.latency_us <= found.p95_us)
        click.echo(
            f"{kind}: {len(errors)} rows predicted, {refused} refused, median error {np.median(errors):.1%}, "
            f"p95 {np.quantile(errors, 0.95):.1%}, {np.mean(inside):.0%} between p5 and p95"
        )


if __name__ == "__main__":
    main()
