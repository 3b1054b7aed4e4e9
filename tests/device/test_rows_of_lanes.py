"""A GPU's row primitives equal loops over elements, for groups of lanes, any number of rows, and every kind of row."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program


def test_rows() -> None:
    program = compile_program(Path(__file__).with_name("rows_of_lanes.cpp"), "-O0")
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
