"""The engine's sources are listed once, in CMakeLists.txt, and whatever is linked of them takes that list."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from compiled import ROOT

sys.path.append(str(ROOT / "tools"))
import protocol_coverage
from engine_sources import ENGINE, ROWS, listed


def test_every_source_is_listed_once() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    built = "".join(re.findall(r"(?:set|APPEND)(?:\(| )(?:ENGINE|BINDINGS|ROWS) [^)]*\)", text))
    assert sorted(re.findall(r"\w+\.cpp", built)) == sorted(path.name for path in (ROOT / "cuda/host").glob("*.cpp"))


def test_only_bindings_know_python() -> None:
    """Programs have no Python, so nothing that they are linked of may include its headers."""
    assert {*ENGINE, *ROWS} >= {"cuda/host/engine.cpp", "cuda/host/rows_portable.cpp"}
    assert [source for source in (*ENGINE, *ROWS) if "nanobind" in (ROOT / source).read_text()] == []


def test_programs_have_no_list_of_their_own() -> None:
    for directory in ("tools", "tests/protocol", "tests/fuzz"):
        for path in set((ROOT / directory).glob("*.py")) - {Path(__file__)}:
            assert not re.search("engine_ops|rows_portable", path.read_text()), path


@pytest.mark.parametrize(("program", "sources"), [("chains", (*ENGINE, *ROWS)), ("peers-gpu", ROWS)])
def test_coverage_links_all(program: str, sources: tuple[str, ...]) -> None:
    assert set(sources) <= set(protocol_coverage.PROGRAMS[program][0])


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("set(ROWS ${HOST}/a.cpp\n  ${HOST}/b.cpp)\n")
    assert listed("ROWS", tmp_path) == ("cuda/host/a.cpp", "cuda/host/b.cpp")
    with pytest.raises(ValueError, match=r"0 lists set\(ENGINE"):
        listed("ENGINE", tmp_path)
