"""`moe-rt calibrate` without ranks: the shapes that it measures, the lines that it keeps and the files that it writes.

The lines are on record. After a change on purpose: python tests/plan/test_calibrate_command.py
"""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from moe_rt.errors import InvalidConfig
from moe_rt.lab.bench import calibrate as module
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.lab.bench.run import Settings
from moe_rt.plan.calibration import load
from moe_rt.plan.points import COLUMNS

RECORD = Path(__file__).with_name("calibrate_lines.csv")
CARD: dict[str, Any] = {
    "cpu": "a Chip (R) 9", "cores": 2, "commit": "abc1234", "moe_rt": "1.2.3", "load_average": 0.25,
    "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


class Bench:
    """A benchmark whose times follow from the case; it notes what it is asked for."""

    def __init__(self, line_ns: float = 40.0) -> None:
        self.line_ns = line_ns
        self.asked: list[tuple[list[Case], Settings]] = []
        self.parts: list[tuple[Any, float]] = []

    def run(self, cases: list[Case], settings: Settings, sweep: bool, progress: Callable[[float], None]) -> Any:
        assert not sweep
        self.asked.append((cases, settings))
        return {"machine": CARD, "runs": [self._record(case, progress) for case in cases]}

    def bar(self, console: Console, transient: bool) -> Any:
        assert (console.stderr, transient) == (True, True)
        add = lambda what, total: self.parts.append((what, total))  # noqa: E731
        return nullcontext(SimpleNamespace(add_task=add, advance=lambda task, part: self.parts.append((task, part))))

    def _record(self, case: Case, progress: Callable[[float], None]) -> dict[str, Any]:
        progress(1.0)
        phases = ("forward", "forward+backward") if case.op == "layer" else ("",)
        us = 20 + case.ranks * case.tokens * case.topk * case.row_bytes / 8e3 * (2 if case.op == "pair" else 1)
        results = [{"phase": phase, "isolated_us": {"p50": us * (1 + len(phase) / 7)}} for phase in phases]
        size = range(case.ranks)
        lines = [[0.0 if peer == rank else self.line_ns + peer for peer in size] for rank in size]
        return {"results": results, "line_latency_ns": lines}


def invoke(bench: Bench, *arguments: str, directory: Path) -> tuple[Result, dict[str, str]]:
    """Run the command in a directory; return what came, and the files there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(module, "run_cases", bench.run)
        patch.setattr(module, "machine_card", lambda: CARD)
        patch.setattr(module, "Progress", bench.bar)
        done = CliRunner().invoke(module.calibrate, list(arguments))
    return done, {path.name: path.read_text() for path in sorted(directory.iterdir()) if path.is_file()}


def kept() -> str:
    with tempfile.TemporaryDirectory() as directory:
        _, files = invoke(Bench(), "--keep", "lines.csv", directory=Path(directory))
    return files["lines.csv"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Result, dict[str, str], Path]:
    bench, directory = Bench(), tmp_path_factory.mktemp("calibrate")
    done, files = invoke(bench, "--iters", "5", "--keep", "lines.csv", directory=directory)
    assert done.exit_code == 0, done.output
    return bench, done, files, directory


def test_all_shapes_are_measured_three_times(measured: tuple[Bench, Result, dict[str, str], Path]) -> None:
    bench, done, files, directory = measured
    assert len(bench.asked) == 3
    for cases, settings in bench.asked:
        assert len(cases) == 3 * 12
        assert {(case.name, case.heap, case.nodes, case.dtype) for case in cases} == {("plan", "shm", 0, "bf16")}
        assert asdict(settings) == {
            "contestants": ("moe_rt.lab.bench.contestants.moe:Timed",), "iters": 5, "warmup": 3, "seed": 0,
            "malloc": "recycle", "cold": False, "trace": False,
        }  # fmt: skip
    assert bench.parts == [("measuring", 3 * 36), *[(None, 1.0)] * (3 * 36)]
    assert files["lines.csv"] == RECORD.read_text()
    fitted = load(directory / "calibration.json")
    assert {(one.library, one.hardware) for one in fitted} == {("moe_rt", "cpu: a Chip (R) 9, 2 cores")}
    assert {one.source for one in fitted} == {"moe-rt calibrate, moe_rt 1.2.3, commit abc1234"}
    assert {(one.device, one.date) for one in fitted} == {("cpu: a Chip (R) 9, 2 cores", "2026-01-02")}
    assert done.stderr == ""
    *shown, last = done.stdout.splitlines()
    assert last == f"calibration.json: {len(fitted)} calibrations, 0 lines refused"
    for line, one in zip(shown, fitted, strict=True):
        assert line == f"{one.median_error:7.1%} median, {one.p95_error:7.1%} p95 of the fit: {one.name}"


def test_the_lines_on_record_have_each_shape_with_each_op() -> None:
    rows = list(csv.DictReader(RECORD.read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 108
    assert rows[:36] == rows[36:72] == rows[72:]
    shapes = [(r["ep_size"], r["tokens_per_rank"], r["hidden"], r["topk"], r["experts"]) for r in rows]
    assert shapes[:12] == shapes[12:24] == shapes[24:36]
    assert [row["op"] for row in rows[:36:12]] == ["dispatch", "combine", "pair"]
    onehot = next(row["notes"] for row in rows if "routing=onehot" in row["notes"])
    assert onehot.startswith("busiest=4.000; to_ranks=1.000; routing=onehot; "), "four experts of one rank"


def test_lines_of_layers_on_nodes() -> None:
    """The experts' size and the nodes are in the notes, backward in the op; the times of phases differ."""
    bench, shape = Bench(), (4, 8, 32, 2, 8, "uniform", 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_cases", bench.run)
        cases = module.cases_of([shape], ["layer"], nodes=2)
        forward, both = module.measure(cases, None, lambda part: None)
    ((_, settings),) = bench.asked
    assert (settings.iters, settings.warmup) == (None, 3)
    (case,) = cases
    assert (case.heap, case.nodes, case.ranks, case.intermediate, case.routing) == ("ucx", 2, 4, 24, "uniform")
    us = 20 + 4 * 8 * 2 * 64 / 8e3
    assert [line["latency_us"] for line in (forward, both)] == [f"{2 * us:.5g}", f"{us * (1 + 16 / 7):.5g}"]
    assert [line["op"] for line in (forward, both)] == ["layer", "layer+backward"]
    assert forward["library"] == "moe_rt, 2 emulated nodes"
    notes = (
        r"busiest=1\.\d{3}; to_ranks=\d\.\d{3}; routing=router; intermediate=24; nodes=2; 2026-01-02T03:04; load 0.25"
    )
    assert re.fullmatch(notes + "; line 42 ns", forward["notes"]), forward["notes"]
    assert both == forward | {"op": both["op"], "latency_us": both["latency_us"]}


def test_cores_without_a_common_cache_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHAPES", module.SHAPES[1:2])
    done, _ = invoke(Bench(400.0), directory=tmp_path)
    says = "cores do not share a cache now (400 ns a line): calibrate again later, to see if they ever do\n"
    assert (done.exit_code, done.stderr) == (0, says)


@pytest.mark.parametrize("error", [InvalidConfig("ranks: got 3"), RankFailed("a rank ended with status 3; see above")])
def test_a_benchmark_that_fails_leaves_no_file(tmp_path: Path, error: Exception) -> None:
    class Failing(Bench):
        def run(self, *arguments: Any) -> None:
            raise error

    done, files = invoke(Failing(), directory=tmp_path)
    assert (done.exit_code, done.stderr) == (1, f"Error: {type(error).__name__}: {error}\n")
    assert files == {}


def test_libraries_and_devices_have_their_own_files_in_a_directory(tmp_path: Path) -> None:
    """Names are of letters and digits; a line that no formula reads is counted."""
    lines = list(csv.DictReader(RECORD.read_text().splitlines()))[:12]
    other = [line | {"library": "moe_rt, 2 emulated nodes", "notes": line["notes"] + "; nodes=2"} for line in lines]
    wrong = lines[0] | {"hidden": "wide"}
    table = tmp_path / "table.csv"
    module.write_lines(table, [*lines, *other, wrong])
    (tmp_path / "out").mkdir()
    done, _ = invoke(Bench(), "--csv", str(table), "--out", "out", directory=tmp_path)
    assert done.exit_code == 0, done.output
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["moe_rt_2_emulated_nodes_cpu_a_chip_r_9_2_cores.json", "moe_rt_cpu_a_chip_r_9_2_cores.json"]
    assert [{one.library for one in load(tmp_path / "out" / name)} for name in files] == [
        {"moe_rt, 2 emulated nodes"},
        {"moe_rt"},
    ]
    assert {one.date for one in load(tmp_path / "out" / files[0])} == {"2026-01-02"}
    assert done.stderr.startswith("line 26 refused: hidden: got ")
    assert done.stdout.splitlines()[-1] == "out: 2 calibrations, 1 lines refused"


if __name__ == "__main__":
    RECORD.write_text(kept())
