"""An injected fault fires once, in its op and at its point, and does what it is asked to."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program


def test_when_a_fault_fires_and_what_it_does() -> None:
    program = compile_program(Path(__file__).with_name("points.cpp"))
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
