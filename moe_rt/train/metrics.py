"""Metrics of a run: metrics.jsonl, and a progress bar."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_rt.errors import InvalidConfig

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Return all rows in the order of writing. Invalid lines are left out.

    A crash cuts the last line short. Any other invalid line is reported: a power loss leaves zeros in place of a line,
    and a run must continue nevertheless, since its state is in its checkpoints.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            got = line.decode(errors="replace")[:40]
            print(f"{path}, line {number}: got {got!r}, expected a JSON object with a step; it is left out")
    return rows


def _row(line: bytes) -> Row | None:
    """Return the row of a whole line, or None."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:  # no JSON, or no UTF-8
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def refuse_to_overwrite(path: Path, resume: bool) -> None:
    """Raise InvalidConfig if `path` belongs to an earlier run that is not to be resumed."""
    if path.exists() and not resume:
        raise InvalidConfig(f"out: got {path.parent}, which holds a run; expected an empty one, or --resume to go on")


class Reporter:
    """Writes one JSON object per line, and shows the latest numbers.

    Training rows hold step, loss (nats per byte), lr, grad_norm, tokens_per_s, aux_loss and expert_load (per layer, the
    fraction of the top-k entries that each expert got). Validation rows hold step, val_loss (nats per byte) and val_bpb
    (bits per byte). A row of step n describes the model before its n-th update if it is a training row, and after it if
    it is a validation row.
    """

    def __init__(self, path: Path, *, first_step: int, steps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Rows that a resumed run reported after its checkpoint are dropped, since those steps run again.
        kept = [row for row in read(path) if row["step"] <= first_step] if first_step else []
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(_line(row) for row in kept))
        rewritten.replace(path)
        self._file = path.open("a")
        self._latest: Row = {}
        for row in kept:
            self._latest |= row
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
        )  # fmt: skip
        self._task = self._progress.add_task(
            "", total=steps, completed=first_step, numbers=latest_numbers(self._latest)
        )

    def training(self, row: Row) -> None:
        self._write(row)
        self._progress.update(self._task, completed=row["step"])

    def validation(self, row: Row) -> None:
        self._write(row)
        self._progress.console.print(f"step {row['step']:>6}  validation {row['val_bpb']:.3f} bits per byte")

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._file.close()

    def _write(self, row: Row) -> None:
        self._file.write(_line(row))
        self._file.flush()
        self._latest |= row
        self._progress.update(self._task, numbers=latest_numbers(self._latest))


def latest_numbers(row: Row) -> str:
    """Text of the progress bar after the step count: the numbers that exist so far."""
    said = {"loss": "loss {:.3f}", "val_bpb": "val {:.3f} bits/byte", "tokens_per_s": "{:,.0f} bytes/s"}
    return "  ".join(text.format(row[name]) for name, text in said.items() if name in row)


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
