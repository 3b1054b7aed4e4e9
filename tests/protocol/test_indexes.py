"""A receiver's index equals a list of all its rows, for random lists, any number of lanes, and at every bound."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program


def test_index_of_rows() -> None:
    program = compile_program(Path(__file__).with_name("indexes.cpp"), "-O0")
    done = subprocess.run([program], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout
