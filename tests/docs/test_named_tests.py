"""Every test that a document names exists, every promise has a mutant, and every field bug has an answer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMISES = ROOT / "tests/promises.md"
DOCS = [ROOT / "README.md", PROMISES, *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")
BUGS = [f"{kind}{i}" for kind, n in zip("MEZOISHL", (13, 16, 8, 7, 3, 6, 8, 6), strict=True) for i in range(1, n + 1)]


def find_tests(path: Path) -> set[str]:
    """Names of a file's tests as pytest spells them, without parameters."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return {name for name in names if name.split("::")[-1].startswith("test_")}


@pytest.mark.parametrize("document", DOCS, ids=lambda d: d.relative_to(ROOT).as_posix())
def test_named_tests_exist(document: Path) -> None:
    for file, name in NAMED.findall(document.read_text()):
        assert (ROOT / file).is_file(), f"{document.name} names {file}"
        assert name in find_tests(ROOT / file), f"{document.name} names {file}::{name}"


def promises() -> list[list[set[str]]]:
    """Rows of the table of promises: the files, tests and mutants that each names."""
    rows = [line.split(" | ")[1:] for line in PROMISES.read_text().splitlines() if line.startswith("| ")]
    return [[set(re.findall(r"`([^`]+)`", cell)) for cell in cells] for cells in rows[1:]]


def test_every_promise_has_a_mutant_that_its_tests_notice() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 or later
    mutants = {}
    for path in (ROOT / "tests/mutants").glob("*.toml"):
        mutants |= tomllib.loads(path.read_text())
    assert len(promises()) > 25
    for files, tests, names in promises():
        assert files
        assert [file for file in files if not (ROOT / file).is_file()] == []
        assert names
        assert names <= mutants.keys(), names - mutants.keys()
        for name in names:
            noticing = {test.partition("[")[0] for test in mutants[name].get("tests", ())}
            assert any(t == n or t.startswith(f"{n}::") for t in tests for n in noticing), f"{name}: {noticing}"


def test_every_field_bug_has_an_answer() -> None:
    table = (ROOT / "docs/field_bugs.md").read_text()
    rows = {cells[0]: cells[2] for cells in re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", table, re.MULTILINE)}
    assert list(rows) == BUGS
    for bug, answer in rows.items():
        if same := re.match(r"as (\w+)", answer):
            assert same[1] in rows, f"{bug} points at {same[1]}"
