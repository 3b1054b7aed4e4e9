"""Any operand in memory that ops write is refused on every rank; on a CPU the group continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from conformance import cases_operands as cases
from conftest import HEAPS
from nodes.node_ranks import NodeRanks
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]
LAYOUTS = ("experts", "tokens")


def every_operand(ranks: Ranks) -> None:
    """Each operand of every op is refused, in both layouts."""
    for layout in LAYOUTS:
        for op in cases.OPS:
            names = ranks.run(cases.operands, op, layout)[0]
            assert names
            for name in names:
                texts = ranks.run(cases.refused, op, layout, name)
                codes = op is cases.dispatch_of_codes and name == "x"
                message = "x: got codes in a token window" if codes else f"{name}: got memory of a token window"
                judge(texts, ranks.heap, f"InvalidInput: {message}, expected")


def judge(texts: list[str], heap: str, message: str) -> None:
    """Check that rank 0 reports the error; on a GPU the host does not check whether its peers have ended the group."""
    assert message in texts[0], texts
    others = ("InvalidInput:", "GroupPoisoned:", "no error") if heap == "loopback" else ("InvalidInput:",)
    assert all(text.startswith(others) for text in texts), texts


@pytest.mark.parametrize("heap", HEAPS)
def test_in_a_token_window(make_ranks: MakeRanks, heap: str) -> None:
    every_operand(make_ranks(heap, 2))


@pytest.fixture(scope="module")
def remote_ranks() -> Iterator[NodeRanks]:
    with closing(NodeRanks((1, 1))) as made:
        yield made


def test_in_a_token_window_over_nodes(remote_ranks: NodeRanks) -> None:
    every_operand(remote_ranks)


@pytest.mark.parametrize("words_apart", [-1, 0])
@pytest.mark.parametrize("name", ["handle.recv_plan", "handle.send_plan"])
@pytest.mark.parametrize("heap", HEAPS)
def test_out_over_a_plan(make_ranks: MakeRanks, heap: str, name: str, words_apart: int) -> None:
    """One word of overlap is refused; memory directly after the plan is accepted."""
    texts: list[Any] = make_ranks(heap, 2).run(cases.out_near_a_plan, name, words_apart)
    if words_apart == 0:
        assert texts == ["no error"] * 2
    else:
        judge(texts, heap, f"InvalidInput: out: got memory of {name}, expected")
