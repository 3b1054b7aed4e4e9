"""Heaps are chosen by name; what code does differently for a heap follows from the table of traits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from moe_rt.memory.heaps import HEAPS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "moe_rt").rglob("*.py"))
NOT_HEAPS = {"contestant == 'shm'", "kind == 'threads'"}  # of a benchmark, and of a resource


def names_in(*nodes: ast.AST) -> Iterator[str]:
    """Yield the names of heaps among these expressions, and among the members of collections."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in HEAPS:
            yield node.value
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield from names_in(*node.elts)


def comparisons(source: str) -> list[str]:
    """Return the comparisons with a heap's name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.value] if isinstance(node, ast.MatchValue) else []
        found += [ast.unparse(node)] if any(names_in(*sides)) else []
    return [text for text in found if text not in NOT_HEAPS]


def test_comparisons_are_found() -> None:
    assert comparisons("if heap == 'shm' or 'ucx' != heap: pass") == ["heap == 'shm'", "'ucx' != heap"]
    assert comparisons("ok = heap in ('gin', name)") == ["heap in ('gin', name)"]
    assert comparisons("match heap:\n    case 'gin': pass") == ["'gin'"]
    assert not comparisons("heap = 'shm' if found('ucx') == 'other' else 'gin'")


def test_no_heap_is_compared_by_name() -> None:
    others = [path for path in FILES if "memory" not in path.relative_to(ROOT).parts]
    found = {f"{path.relative_to(ROOT)}: {text}" for path in others for text in comparisons(path.read_text())}
    assert not found, "use the traits in moe_rt/memory/heaps.py"


def test_the_page_lists_the_files_that_name_every_heap() -> None:
    """Only these files change for a new heap, next to its own module."""
    naming = set()
    for path in FILES:
        if set(names_in(*ast.walk(ast.parse(path.read_text())))) == set(HEAPS):
            naming.add(path.relative_to(ROOT).as_posix())
    page = (ROOT / "docs/contributing/add_a_heap.md").read_text()
    (step,) = re.findall(r"(?ms)^2\. (.*?)(?=^3\. )", page)
    assert set(re.findall(r"`(moe_rt/[\w/]+\.py)`", step)) == naming
