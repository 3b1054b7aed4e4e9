"""Tests of the emulated GPU, on the compiled kernels in the place of the templates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ("-p", "ptx.in_place_of_emulated", "-p", "no:cacheprovider", "-q", "--timeout", "900")


def run_tests(*arguments: str, clock: str) -> int:
    """How many passed; all of them have to."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PTX_CLOCK": clock}
    command = [sys.executable, "-m", "pytest", *PLUGIN, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


@pytest.mark.sweep
def test_what_goes_wrong() -> None:
    assert run_tests("tests/device/test_cuda_faults.py", "tests/device/test_dead_gpu.py", clock="host") >= 30
