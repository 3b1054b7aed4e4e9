"""Runs the tests of the emulated GPU with the compiled kernels in place of the templates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ("-p", "ptx.in_place_of_emulated", "-p", "no:cacheprovider", "-q", "--timeout", "900")
NO_TESTS = 5  # pytest's exit status then
HOURS = pytest.mark.timeout(4 * 3600)


def run_tests(*arguments: str, clock: str) -> int:
    """Return the number of passed tests; all must pass, and must have executed kernels."""
    said = _pytest(*PLUGIN, *arguments, clock=clock)
    launches, passed = (re.search(text, said) for text in (r"executed PTX: (\d+) launches", r"(\d+) passed"))
    assert launches is not None, said
    assert passed is not None, said
    assert int(launches[1]) > int(passed[1])
    return int(passed[1])


def num_tests(*arguments: str) -> int:
    """Return the number of tests that the emulated GPU would run."""
    collected = re.search(r"(\d+)(?:/\d+)? tests collected", _pytest("--collect-only", "-q", *arguments, clock=""))
    return int(collected[1]) if collected else 0


def _pytest(*arguments: str, clock: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PTX_CLOCK": clock}
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, NO_TESTS), done.stdout + done.stderr
    return done.stdout


@HOURS
@pytest.mark.sweep
def test_what_goes_wrong() -> None:
    assert run_tests("tests/device/test_cuda_faults.py", "tests/device/test_dead_gpu.py", clock="host") >= 30


@HOURS
@pytest.mark.sweep
@pytest.mark.parametrize("path", sorted(path.name for path in (ROOT / "tests" / "conformance").glob("test_*.py")))
def test_conformance(path: str) -> None:
    """Every case of the emulated GPU also passes on executed PTX."""
    cases = (f"tests/conformance/{path}", "-k", "loopback")
    expected = num_tests(*cases)
    assert expected == 0 or run_tests(*cases, clock="still") == expected
