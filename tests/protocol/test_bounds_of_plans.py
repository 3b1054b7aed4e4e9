"""Numbers in a handle's plans are accepted up to their bounds and refused past them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program


def test_numbers_at_their_bounds() -> None:
    program = compile_program(Path(__file__).with_name("plans.cpp"))
    done = subprocess.run([program], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[:3000]
