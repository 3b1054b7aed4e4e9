"""A rank asks a network for exactly what it needs: each request is recorded, in order, with its place and length."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program


def test_requests_of_a_network() -> None:
    program = compile_program(Path(__file__).with_name("remote_steps.cpp"))
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
