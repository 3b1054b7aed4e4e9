"""The engine's sources are listed once, in CMakeLists.txt, and every program that links them uses that list."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cpp_programs import ROOT

sys.path.append(str(ROOT / "tools"))
import protocol_coverage
from engine_sources import ENGINE, ROWS, listed

from moe_rt import _engine


def test_every_source_is_listed_once() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    built = "".join(re.findall(r"(?:set|APPEND)(?:\(| )(?:ENGINE|BINDINGS|ROWS) [^)]*\)", text))
    assert sorted(re.findall(r"\w+\.cpp", built)) == sorted(path.name for path in (ROOT / "cuda").rglob("*.cpp"))


def test_only_bindings_know_python() -> None:
    """Only the bindings include Python's headers, as test programs link without Python."""
    assert {*ENGINE, *ROWS} >= {"cuda/cpu/engine.cpp", "cuda/cpu/rows_portable.cpp"}
    assert [source for source in (*ENGINE, *ROWS) if "nanobind" in (ROOT / source).read_text()] == []


def test_programs_have_no_list_of_their_own() -> None:
    for directory in ("tools", "tests/protocol", "tests/fuzz"):
        for path in set((ROOT / directory).glob("*.py")) - {Path(__file__)}:
            assert not re.search("engine_ops|rows_portable", path.read_text()), path


@pytest.mark.parametrize(("program", "sources"), [("chains", (*ENGINE, *ROWS)), ("peers-gpu", ROWS)])
def test_coverage_links_all(program: str, sources: tuple[str, ...]) -> None:
    assert set(sources) <= set(protocol_coverage.PROGRAMS[program][0])


# clang packages of Debian and Ubuntu since clang 13.
CLANGS = [name for name in ("clang++", *(f"clang++-{version}" for version in range(13, 23))) if shutil.which(name)]
X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.parametrize("compiler", CLANGS)
def test_every_clang_here_takes_the_engine(compiler: str) -> None:
    """Every clang here compiles the engine with the flags of CMakeLists.txt; Python's bindings are left to package
    builds."""
    text = (ROOT / "CMakeLists.txt").read_text()
    always = re.findall(r"target_compile_options\(_engine PRIVATE (.*)\)", text)[0].split()
    for source in (*ENGINE, *ROWS, *(f"cuda/cpu/rows_{isa}.cpp" for isa in ("avx2", "avx512") if X86)):
        name = re.escape(Path(source).name)
        own = re.findall(rf'set_source_files_properties\(\S*/{name} PROPERTIES\s+COMPILE_OPTIONS "(.*)"\)', text)
        defined = re.findall(rf"set_source_files_properties\(\S*/{name} PROPERTIES COMPILE_DEFINITIONS (\w+)\)", text)
        flags = [*always, *";".join(own).split(";"), *(f"-D{macro}" for macro in defined if X86)]
        command = [compiler, "-std=c++20", "-fsyntax-only", "-Werror", *filter(None, flags), str(ROOT / source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr


def test_row_primitives_are_those_that_the_processor_has() -> None:
    """The system and the engine, which query the processor differently, agree on its row primitives."""
    flags = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    if not X86 or flags is None:
        pytest.skip("row primitives of other processors are portable ones")
    needs = {"avx2": {"avx2", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}
    assert set(_engine.isas()) - {"portable"} == {isa for isa, names in needs.items() if names <= {*flags[1].split()}}


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("set(ROWS cuda/cpu/a.cpp\n  cuda/cpu/b.cpp)\n")
    assert listed("ROWS", tmp_path) == ("cuda/cpu/a.cpp", "cuda/cpu/b.cpp")
    with pytest.raises(ValueError, match=r"0 lists set\(ENGINE"):
        listed("ENGINE", tmp_path)
