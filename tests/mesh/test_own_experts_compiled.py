"""Compiled layers with a user's experts, or with adapters on experts: their means keep the order of ranks that are not
compiled, and they train as one process does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mesh import cases_own_experts as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("which", [[0], [0, 3], [0, 1, 2, 3]])
def test_compiled_ranks_take_means_in_the_order_of_the_others(make_ranks: MakeRanks, which: list[int]) -> None:
    """Means are collective over copies of the experts: they and exchanges must not wait for each other in a circle."""
    found = make_ranks("shm", 4).run(cases.next_to_copies, cases.Pair, which)
    for (eager, mixed), (copy, _) in zip(found, found[2:] + found[:2], strict=True):
        torch.testing.assert_close(mixed, eager)
        torch.testing.assert_close(copy, eager)


def test_adapters_by_hand_train_as_in_one_process(make_ranks: MakeRanks) -> None:
    expected = cases.adapted_by_hand(None, False, "eager")
    for got in make_ranks("shm", 2).run(cases.adapted_by_hand, False, "compiled"):
        assert got == pytest.approx(expected, rel=1e-4)
