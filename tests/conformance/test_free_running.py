"""Chains without a drain: skewed and sleeping ranks, zero-token ranks, every output checked, the last one in full."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import HEAPS
from support import real_gpu
from support.ranks import Ranks
from support.rounds import chain


@pytest.mark.parametrize("heap", HEAPS)
def test_chain(make_ranks: Callable[[str, int], Ranks], heap: str) -> None:
    pairs = 40 if heap == "loopback" and not real_gpu.is_in_place() else 2000  # an emulated launch starts threads
    assert make_ranks(heap, 3).run(chain, pairs) == [pairs] * 3
