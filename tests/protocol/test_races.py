"""The protocol under sanitizers: free-running ranks that are threads with teams of lanes, every output checked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from protocol.engine_programs import compile_program

RANKS, LANES = "3", "3"
# A round is one to three dispatches, as many combines, and backwards. Few rounds suffice to detect a weakened order.
ROUNDS, MANY_ROUNDS, FEW_ROUNDS = "45", "600", "4"
RACE = "WARNING: ThreadSanitizer: data race"
MOST_TOKENS, FEW_TOKENS = "9", "2"  # tokens per rank; with few, a GPU op is one launch
NEAR_A_WRAP = [str(2**32 - 3), str(2**64 - 3)]  # first sequence numbers, from which few rounds pass 32 and 64 bits
# Ranks, lanes, first sequence number, rows, nodes, route and depth of runs with several ops under way.
OPS_UNDER_WAY = [
    ("3", "3", "1", "experts", "1", "flat", "2"),
    ("2", "1", NEAR_A_WRAP[1], "tokens", "1", "flat", "3"),
    ("4", "2", "1", "experts", "2", "flat", "2"),
    ("5", "2", "1", "experts", "2", "two_level", "2"),
    ("3", "1", "1", "invariant", "3", "two_level", "2"),
]
# Ranks, lanes, rows, nodes and tokens of runs in two levels in which a rank at a time ends its op after all others.
ONE_IS_LATE = [
    ("4", "2", "experts", "2", MOST_TOKENS),
    ("5", "1", "tokens", "2", MOST_TOKENS),
    ("4", "1", "invariant", "2", MOST_TOKENS),
    ("3", "2", "experts", "3", "150"),
]

GPU = "-DMOE_RT_EMULATED_GPU"  # lanes then belong to a block, and every launch has several blocks
NETWORK = [GPU, "-DMOE_RT_EMULATED_NETWORK"]  # no peer is mapped


def run(program: Path, *args: str, weakened: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WEAKENED": weakened}
    return subprocess.run([str(program), *args], env=environment, capture_output=True, text=True, timeout=3000)


def compile_stress(sanitizer: str, machine: list[str]) -> Path:
    return compile_program("stress.cpp", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", *machine)


@pytest.mark.parametrize(
    ("machine", "rounds", "sanitizer"),
    [
        pytest.param([], ROUNDS, "thread", id="cpu-thread"),
        pytest.param([], MANY_ROUNDS, "thread", id="cpu-thread-long", marks=pytest.mark.sweep),
        pytest.param([], ROUNDS, "address,undefined", id="cpu-address"),
        pytest.param([GPU], FEW_ROUNDS, "thread", id="gpu-thread"),
        pytest.param([GPU], FEW_ROUNDS, "address,undefined", id="gpu-address", marks=pytest.mark.sweep),
        pytest.param(NETWORK, FEW_ROUNDS, "thread", id="network-thread"),
        pytest.param(NETWORK, FEW_ROUNDS, "address,undefined", id="network-address", marks=pytest.mark.sweep),
    ],
)
def test_no_report(machine: list[str], rounds: str, sanitizer: str) -> None:
    program = compile_stress(sanitizer, machine)
    if sanitizer != "thread":  # a race needs many rounds to show, a stray access few
        rounds = str(int(rounds) // 4)
    for ranks, lanes in ((RANKS, LANES), ("2", "1"), ("4", "2")):
        result = run(program, ranks, lanes, rounds)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "WARNING" not in result.stderr
        assert f"{ranks} ranks of {lanes} lanes, {rounds} rounds: every output as expected" in result.stdout
    if machine != [GPU]:  # nodes, with a network between them that is as late as allowed
        for ranks, lanes, nodes, route in (
            ("4", "2", "2", "two_level" if machine else "flat"),
            ("5", "2", "2", "two_level"),
            ("3", "1", "3", "two_level"),
        ):
            for rows in ("experts", "tokens", "invariant"):
                result = run(program, ranks, lanes, FEW_ROUNDS, "1", rows, "", nodes, MOST_TOKENS, route)
                assert result.returncode == 0, result.stdout + result.stderr
    for ranks, lanes, first_seq, rows, nodes, route, depth in OPS_UNDER_WAY if machine == [] else ():
        more = first_seq, rows, "", nodes, MOST_TOKENS, route, depth
        result = run(program, ranks, lanes, rounds if nodes == "1" else FEW_ROUNDS, *more)
        assert result.returncode == 0, result.stdout + result.stderr
    for first_seq, *rows in (
        (NEAR_A_WRAP[0], "experts", ""),
        (NEAR_A_WRAP[1], "tokens", ""),
        ("1", "experts", "scales"),
        ("1", "invariant", ""),
        ("1", "experts", "", "1", FEW_TOKENS),
    ):
        result = run(program, RANKS, LANES, FEW_ROUNDS, first_seq, *rows)
        assert result.returncode == 0, result.stdout + result.stderr


def test_sequence_numbers_compared_plainly_fail() -> None:
    """The chain across 2**64 detects signals compared with >=, which works up to there."""
    program = compile_stress("thread", [])
    outcomes = [run(program, RANKS, LANES, FEW_ROUNDS, first, weakened="wrap") for first in NEAR_A_WRAP]
    assert [outcome.returncode == 0 for outcome in outcomes] == [True, False]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize(("ranks", "lanes", "rows", "nodes", "tokens"), ONE_IS_LATE)
def test_a_late_rank_serves_its_clients(
    sanitizer: str, ranks: str, lanes: str, rows: str, nodes: str, tokens: str
) -> None:
    """Its network's thread stages, adds up and passes on what the other ranks need to end the op before it does."""
    program = compile_stress(sanitizer, [])
    result = run(program, ranks, lanes, FEW_ROUNDS, "1", rows, "", nodes, tokens, "two_level", "1", "late")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WARNING" not in result.stderr


@pytest.mark.parametrize(
    ("machine", "weakened"),
    [
        ([], "release"),
        ([GPU], "last_block"),
        ([], "window_selector"),
        pytest.param([GPU], "release", marks=pytest.mark.sweep),
        pytest.param([GPU], "window_selector", marks=pytest.mark.sweep),
    ],
)
def test_weakened_order_is_reported(machine: list[str], weakened: str) -> None:
    """The detector reports relaxed signals, blocks that do not publish their writes, and windows reused immediately."""
    program = compile_stress("thread", machine)
    for _ in range(20):  # an op may fail on what it reads, and end the run, before the detector reports
        result = run(program, RANKS, LANES, FEW_ROUNDS, weakened=weakened)
        assert result.returncode != 0
        if RACE in result.stderr:
            break
    assert RACE in result.stderr
    assert any(role in result.stderr for role in ("gather", "reduce", "RouteLists")), "the race is on a window"
