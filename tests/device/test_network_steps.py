"""A GPU's launches ask a network for exactly what they need, in an order in which no lane overtakes another."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program


def test_calls_of_a_network() -> None:
    program = compile_program(Path(__file__).with_name("network_steps.cpp"), "-O0")
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
