"""Chains without a drain: skewed and sleeping ranks, zero-token ranks, every output checked, the last one in full."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import CPU_HEAPS, HEAPS
from support.ranks import Ranks
from support.rounds import chain


@pytest.mark.parametrize("heap", HEAPS)
def test_chain(make_ranks: Callable[[str, int], Ranks], heap: str) -> None:
    pairs = 2000 if heap in CPU_HEAPS else 40  # an emulated launch starts threads
    assert make_ranks(heap, 3).run(chain, pairs) == [pairs] * 3
