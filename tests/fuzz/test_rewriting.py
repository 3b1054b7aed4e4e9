"""Peers rewrite lists while ranks read them: no crash, no hang, and no error other than a MoeRtError.

Each heap takes seconds; MOE_RT_REWRITING_MINUTES=20 runs each that long, MOE_RT_REWRITING_SEED draws others.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from conftest import HEAPS
from fuzz import cases_rewriting as cases
from nodes.node_ranks import NodeRanks
from support.ranks import Ranks, ThreadRanks

MakeRanks = Callable[[str, int], Ranks]
MINUTES = float(os.environ.get("MOE_RT_REWRITING_MINUTES", "0"))
SEED = int(os.environ.get("MOE_RT_REWRITING_SEED", "1"))
BUFFERS = 10  # per call
NODES = (1, 2)
OF_HEAP = {"loopback": {"overflow": "drop"}}  # its host does not check, and retries nothing


def rewrite(ranks: Ranks, control: bool = False, **fixed: Any) -> Counter[str]:
    """Rewrite for the requested time, and until some rank found corrupt lists; return how the ops ended."""
    total: Counter[str] = Counter()
    end, seed = time.monotonic() + 60 * MINUTES, SEED
    while not total or not total["CorruptPeer"] or time.monotonic() < end:
        for ends in ranks.run(cases.rewritten, seed, BUFFERS, ranks.size, control, fixed):
            total += ends
        seed += 1
    print(f"{ranks.heap}, {ranks.size} ranks, seeds {SEED} to {seed - 1}, {BUFFERS} buffers of each: {dict(total)}")
    return total


@pytest.mark.parametrize("heap", HEAPS)
def test_lists(make_ranks: MakeRanks, heap: str) -> None:
    assert rewrite(make_ranks(heap, 2), **OF_HEAP.get(heap, {}))["words rewritten"] > 0


@pytest.mark.parametrize("heap", ["shm", "loopback"])
def test_all_that_peers_write(make_ranks: MakeRanks, heap: str) -> None:
    """Also mailboxes, poison words, op records and last words may be rewritten."""
    rewrite(make_ranks(heap, 2), control=True, **OF_HEAP.get(heap, {}))


def test_lists_that_are_staged() -> None:
    """Lists that a proxy has fetched from another node for its neighbours, who map them, may be rewritten."""
    rewrite(ThreadRanks(3, nodes=(0, 1, 1)), route="two_level")


@pytest.fixture(scope="module")
def remote_ranks() -> Iterator[NodeRanks]:
    with closing(NodeRanks(NODES)) as made:
        yield made


@pytest.mark.parametrize("route", ["flat", "two_level"])
def test_lists_over_nodes(remote_ranks: NodeRanks, route: str) -> None:
    rewrite(remote_ranks, heap="ucx", route=route)
