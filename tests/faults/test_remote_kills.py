"""Ranks die, or stop, while rows are in flight between emulated nodes: no survivor dies with them, and none hangs.

UCX killed survivors here as long as its one-sided gets and puts were used (docs/howto/cluster.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from faults import cases_remote as cases
from nodes.node_ranks import NodeRanks

from moe_rt.config.options import Route
from moe_rt.lab.chaos.node_trials import ROUTES

SOME, MANY = range(4), range(4, 30)
PAUSE_S, TIMEOUT_S = 0.2, 5.0
FAILURES = ("PeerDead:", "GroupPoisoned:")
# A rank that reported the stop may have lost its link to the stopped rank; the other peers only announced their close.
FAILURES_OF_A_STOP = (*FAILURES, "PeerTimeout:", "GroupClosed:")


@pytest.fixture(scope="module")
def ranks() -> Iterator[NodeRanks]:
    with closing(NodeRanks((1, 1, 1), rate="200mbit")) as made:
        yield made


@pytest.mark.parametrize("seed", [*SOME, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in MANY)])
@pytest.mark.parametrize("route", ROUTES)
def test_a_kill_among_gets_and_puts(ranks: NodeRanks, route: Route, seed: int) -> None:
    killed = seed % ranks.size
    outcomes = ranks.outcomes(cases.large_rounds, route, killed, seed, PAUSE_S * (seed % 2))
    ranks.restart()
    assert isinstance(outcomes.pop(killed), ChildProcessError), outcomes
    assert [text for text in outcomes if not str(text).startswith(FAILURES)] == []


@pytest.mark.parametrize("seed", [*SOME[:2], *(pytest.param(seed, marks=pytest.mark.sweep) for seed in MANY)])
@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_among_gets_and_puts(ranks: NodeRanks, route: Route, seed: int, tmp_path: Path) -> None:
    """A rank that resumes after its peers timed out raises."""
    outcomes = ranks.outcomes(
        cases.large_rounds_with_a_stop, route, seed % ranks.size, seed, TIMEOUT_S, str(tmp_path / "marker")
    )
    ranks.restart()
    assert [text for text in outcomes if not str(text).startswith(FAILURES_OF_A_STOP)] == []
