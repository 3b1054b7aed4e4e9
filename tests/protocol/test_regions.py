"""Regions of segments, of private copies of unmapped peers' data, and of a GPU's network memory do not overlap."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program


def test_no_two_regions_overlap() -> None:
    """The addresses that roles compute, for nodes, depth, both orders of sums, and small batches that are pushed.

    Rounding to pages hides an overlap from tests with few tokens, which run real ops.
    """
    program = compile_program(Path(__file__).with_name("regions.cpp"))
    done = subprocess.run([program], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[:3000]
