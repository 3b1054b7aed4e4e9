"""Row primitives of every instruction set equal loops over elements, in every bit, and write nothing next to a row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cpp_programs import ROOT, compile_program

from moe_rt import _engine

sys.path.append(str(ROOT / "tools"))
from engine_sources import for_processors

FLAGS = {source.split("rows_")[-1].removesuffix(".cpp"): flags for source, flags in for_processors().items()}


FLAGS["portable"] = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.parametrize("isa", _engine.isas())
def test_rows(isa: str) -> None:
    """Sanitizers of the portable loops also report reads next to a row."""
    program = compile_program(Path(__file__).with_name("rows.cpp"), "-O0", *FLAGS[isa])
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
