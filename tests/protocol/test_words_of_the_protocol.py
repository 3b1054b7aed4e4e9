"""The small functions of cuda/protocol/core agree with their definitions, at every bound."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program


def test_words_codes_and_shares() -> None:
    """Words and headers that ranks exchange, codes of rows, windows, shares of lanes and prefix sums."""
    program = compile_program(Path(__file__).with_name("words.cpp"))
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
