"""Steps of gpucheck. A step is a function that takes a Check, runs its parts and records findings in it."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """A named step: "module:function", called with a Check. The module is imported only where the step runs."""

    name: str
    function: str
    seconds: float  # maximum
    title: str
    virtual: bool = False  # runs several ranks on one GPU, with thread_ranks.ENVIRONMENT
    timed: bool = False  # measures time, so that it needs the GPU for itself


_CHECK = "moe_rt.lab.check"
# The most telling steps come first, so that a run which is cut short has done them.
STEPS = {
    step.name: step
    for step in (
        Step("smoke", f"{_CHECK}.scale:check_smoke", 80, "the smallest rounds, of 1, 2 and 8 virtual ranks", True),
        Step(
            "correctness",
            f"{_CHECK}.correctness:check",
            120,
            "rounds of 1 to 8 virtual ranks equal the reference",
            True,
        ),
        Step("scale", f"{_CHECK}.scale:check", 110, "bits at the sizes of large models, and of every transport", True),
        Step("graphs", f"{_CHECK}.graphs:check", 60, "captured rounds, replayed on changed inputs", True),
        Step("syncfree", f"{_CHECK}.layers:check_syncfree", 60, "a layer's step never makes the host wait"),
        Step("layer", f"{_CHECK}.layers:check", 120, "the layer equals a dense loop, eager and compiled"),
        Step("training", f"{_CHECK}.training:check", 100, "autocast, optimiser steps, layers of virtual ranks", True),
        Step("errors", f"{_CHECK}.failures:check", 60, "errors are raised, and in time", True, timed=True),
        Step("timing", f"{_CHECK}.timing:check", 150, "speed, next to a plain copy", True, timed=True),
        Step("loads", f"{_CHECK}.loads:check", 150, "speed from 1 to 4096 tokens, next to torch", True, timed=True),
        Step("chains", f"{_CHECK}.correctness:check_chains", 60, "free-running pairs on 3 virtual ranks", True),
        Step(
            "nodes",
            f"{_CHECK}.correctness:check_nodes",
            60,
            "the two-level route of virtual ranks on 2 or 3 nodes",
            True,
        ),
        Step("compile", f"{_CHECK}.compiling:check", 90, "compile every kernel for this GPU"),
        Step("processes", f"{_CHECK}.processes:check", 180, "one process per GPU, with --nproc", timed=True),
        Step("nvshmem", f"{_CHECK}.network:check", 90, "a round over NVSHMEM"),
        Step("serving", f"{_CHECK}.serving:check", 240, "vLLM over moe_rt, if it is installed", True),
        Step("sanitizer", f"{_CHECK}.sanitizing:check", 310, "compute-sanitizer on a round"),
    )
}


class Skipped(Exception):
    """Raised by a step that cannot run here and may be skipped; the message says why."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""


class _SavedRows(list[list[Any]]):
    """Rows of a table that grows; `save` is called after each."""

    save: Callable[[], None] = staticmethod(lambda: None)

    def append(self, row: list[Any]) -> None:
        super().append(row)
        self.save()


@dataclass
class Check:
    """One run of one step.

    Attributes:
        device: a CUDA device's name, or an object that emulates a GPU.
        quick: do less of everything.
        seconds: the step's share of time.
        sizes: numbers of ranks to try, or None for all.
        nproc: processes, and so GPUs, that a multi-GPU step may use.
        save: called whenever there is a new finding, so that it survives the process.
        announce: called with what a long step has just done.
    """

    device: Any
    quick: bool = False
    seconds: float = 60.0
    sizes: tuple[int, ...] | None = None
    nproc: int = 1
    save: Callable[[Check], None] = lambda check: None
    announce: Callable[[str], None] = lambda text: None
    details: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def say(self, detail: str) -> None:
        """Add to the step's one-line summary."""
        self.details.append(detail)
        self.save(self)

    def add(self, table: Table) -> None:
        self.tables.append(table)
        self.save(self)

    def begin(self, title: str, columns: list[str], note: str = "") -> list[list[Any]]:
        """Add a table and return its rows. Each appended row is saved, so a step that is cut short keeps it."""
        rows = _SavedRows()
        rows.save = lambda: self.save(self)
        self.add(Table(title, columns, rows, note))
        return rows

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record an exception raised in this block, so that the next part runs."""
        try:
            yield
        except Skipped:
            raise
        except Exception:
            self.failures.append(f"{name}: {traceback.format_exc()}")
            self.save(self)

    def record(self, step: str, result: str, seconds: float) -> dict[str, Any]:
        return {
            "step": step,
            "result": result,
            "seconds": round(seconds, 3),
            "detail": "; ".join(self.details),
            "error": "\n".join(self.failures),
            "tables": [asdict(table) for table in self.tables],
        }


def perform(step: Step, check: Check) -> dict[str, Any]:
    """Run a step in this process and return its record. Exceptions in it become part of the record."""
    begin, result = time.monotonic(), "ok"
    try:
        module, _, function = step.function.partition(":")
        getattr(importlib.import_module(module), function)(check)
        if check.failures:
            result = "failed"
    except Skipped as why:
        result = "skipped"
        check.details.append(str(why))
    except Exception:
        result = "failed"
        check.failures.append(traceback.format_exc())
    return check.record(step.name, result, time.monotonic() - begin)
