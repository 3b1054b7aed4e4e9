"""What a run reports: metrics.jsonl, and a progress bar for who watches."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_rt.errors import InvalidConfig

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """All rows in the order of writing; a last line that a crash cut short is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def refuse_to_overwrite(path: Path, resume: bool) -> None:
    """Raises InvalidConfig if `path` is of an earlier run that is not to be resumed."""
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
        # What a resumed run had reported beyond its checkpoint happens once more.
        kept = [row for row in read(path) if row["step"] <= first_step] if first_step else []
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(_line(row) for row in kept))
        rewritten.replace(path)
        self._file = path.open("a")
        val_bpb = next((row["val_bpb"] for row in reversed(kept) if "val_bpb" in row), float("nan"))
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  val {task.fields[val_bpb]:.3f} bits/byte"),
            TextColumn("{task.fields[tokens_per_s]:,.0f} bytes/s"),
        )  # fmt: skip
        self._task = self._progress.add_task(
            "", total=steps, completed=first_step, loss=float("nan"), val_bpb=val_bpb, tokens_per_s=0.0
        )

    def training(self, row: Row) -> None:
        self._write(row)
        self._progress.update(self._task, completed=row["step"], loss=row["loss"], tokens_per_s=row["tokens_per_s"])

    def validation(self, row: Row) -> None:
        self._write(row)
        self._progress.update(self._task, val_bpb=row["val_bpb"])
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


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
