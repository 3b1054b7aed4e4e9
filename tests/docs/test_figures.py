"""Every figure of the result tables, and every bar of the plot, is that of a file under bench/results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("README.md", "bench/results", "docs/results.svg", "tools/results.py")


def a_copy(root: Path) -> Path:
    for part in PARTS:
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, root / part)
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, root / "tools/results.py", *arguments], capture_output=True, text=True)


def test_documents_equal_the_files(tmp_path: Path) -> None:
    done = run(a_copy(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_figure_fails(tmp_path: Path) -> None:
    root = a_copy(tmp_path)
    readme = root / "README.md"
    before = readme.read_text()
    row = next(line for line in before.splitlines() if line.startswith("| 2 ranks, 512 tokens"))
    cells = row.split("|")
    cells[2] = " 0.5 "
    readme.write_text(before.replace(row, "|".join(cells)))
    done = run(root)
    assert done.returncode == 1
    assert done.stdout == "README.md differs from bench/results\n"
    run(root, "--write")
    assert readme.read_text() == before


def test_a_changed_file_fails_everywhere(tmp_path: Path) -> None:
    root = a_copy(tmp_path)
    path = root / "bench/results/epyc-zen5-4core-2026-11-22/recycle.json"
    document = json.loads(path.read_text())
    document["runs"][0]["results"][0]["isolated_us"]["p50"] *= 2
    path.write_text(json.dumps(document))
    assert run(root).stdout.splitlines() == [
        f"{name} differs from bench/results" for name in (PARTS[0], "bench/results/README.md", PARTS[2])
    ]
