"""Every generated figure and every bar of the plot is that of a file under bench/results."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = (
    "README.md",
    "docs/benchmarks.md",
    "docs/cuda.md",
    "bench/results/README.md",
    "bench/results/exchange.csv",
    "docs/results.svg",
)
PARTS = ("README.md", "docs/benchmarks.md", "docs/cuda.md", "bench/results", "docs/results.svg", "tools/results.py")


def a_copy(root: Path) -> Path:
    for part in PARTS:
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, root / part)
    return root


def run(root: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines of the tool, in this process, which has imported torch already."""
    said = io.StringIO()
    tool = str(root / "tools/results.py")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [tool, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(tool, run_name="__main__")
    return int(end.value.code or 0), said.getvalue().splitlines()


def test_documents_equal_the_files(tmp_path: Path) -> None:
    assert run(a_copy(tmp_path)) == (0, [])


@pytest.mark.parametrize(
    ("name", "figure", "other"),
    [
        ("README.md", "Batches take 1.04", "Batches take 1.03"),
        ("docs/benchmarks.md", "top-4 | 1.23 |", "top-4 | 0.5 |"),
        ("docs/cuda.md", "| 4,494 |", "| 4,000 |"),
        ("bench/results/exchange.csv", "pair-2x512x2048,1.23,", "pair-2x512x2048,0.5,"),
        ("docs/results.svg", "moe_rt  1.04\u00d7", "moe_rt  1.03\u00d7"),
    ],
)
def test_a_changed_figure_fails(tmp_path: Path, name: str, figure: str, other: str) -> None:
    root = a_copy(tmp_path)
    document = root / name
    before = document.read_text()
    assert before.count(figure) == 1
    document.write_text(before.replace(figure, other))
    assert run(root) == (1, [f"{name} differs from bench/results"])
    assert run(root, "--write") == (0, [f"{name} written"])
    assert document.read_text() == before or name.endswith(".svg")
    assert run(root) == (0, [])


def test_a_changed_file_fails_everywhere(tmp_path: Path) -> None:
    root = a_copy(tmp_path)
    path = root / "bench/results/epyc-zen5-4core-2026-11-22/recycle.json"
    document = json.loads(path.read_text())
    document["runs"][0]["results"][0]["isolated_us"]["p50"] *= 2
    path.write_text(json.dumps(document))
    others = [name for name in WRITTEN if name != "docs/cuda.md"]  # that page shows a GPU's report
    assert run(root) == (1, [f"{name} differs from bench/results" for name in others])
