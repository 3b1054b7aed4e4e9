"""The protocol under sanitizers: ranks are threads with teams of lanes, free-running, every output checked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build import compile_program

RANKS, LANES, ROUNDS = "3", "3", "2000"  # a round is one to three dispatches, as many combines, and backwards


def run(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *args], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_report(tmp_path: Path, sanitizer: str) -> None:
    program = compile_program("stress.cpp", tmp_path / "stress", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    for ranks, lanes in ((RANKS, LANES), ("2", "1"), ("4", "2")):
        result = run(program, ranks, lanes, ROUNDS)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "WARNING" not in result.stderr
        assert f"{ranks} ranks of {lanes} lanes, {ROUNDS} rounds: every output as expected" in result.stdout


def test_weakened_release_is_reported(tmp_path: Path) -> None:
    """The detector is not blind: with relaxed signals it must speak up."""
    program = compile_program("stress.cpp", tmp_path / "weak", "-fsanitize=thread", "-DMOE_RT_WEAKEN_RELEASE")
    result = run(program, RANKS, LANES, "20")
    assert result.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in result.stderr
    assert "gather" in result.stderr or "reduce" in result.stderr, "the race is on a window"
