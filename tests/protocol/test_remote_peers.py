"""Unmapped ranks, over a network that does everything as late as allowed: every output is checked."""

from __future__ import annotations

import subprocess

import pytest
from protocol.engine_programs import compile_program

ROUNDS, FEW_ROUNDS = "20", "4"


@pytest.mark.parametrize("rows", ["experts", "tokens"])
@pytest.mark.parametrize(
    ("ranks", "nodes", "lanes"), [("2", "2", "1"), ("3", "3", "2"), ("4", "2", "2"), ("5", "2", "1")]
)
@pytest.mark.parametrize("scales", ["", pytest.param("scales", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("route", "tokens"), [("flat", "9"), ("two_level", "9"), ("two_level", "150")])
def test_every_output(ranks: str, nodes: str, lanes: str, rows: str, scales: str, route: str, tokens: str) -> None:
    """Every output is right in chains of up to three dispatches in a row, past 32 bits of sequence numbers. Lists of
    many tokens are fetched in two steps."""
    program = compile_program("stress.cpp")
    rounds = ROUNDS if tokens == "9" else FEW_ROUNDS
    arguments = [ranks, lanes, rounds, str(2**32 - 3), rows, scales, nodes, tokens, route]
    result = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{ranks} ranks of {lanes} lanes, {rounds} rounds: every output as expected" in result.stdout
