"""A block in training: checkpointing, and micro-batches one by one and two concurrently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layer import cases_training as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]
BITWISE = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("num_tokens", [[10, 3], [7, 0, 16]], ids=str)
def test_activation_checkpointing_changes_no_bit(make_ranks: MakeRanks, num_tokens: list[int]) -> None:
    for plain, recomputed, forwards in make_ranks("shm", len(num_tokens)).run(cases.checkpointed, num_tokens):
        torch.testing.assert_close(recomputed, plain, **BITWISE)
        assert forwards == 3, "the second pass runs the layer again"


def test_micro_batches_add_up(make_ranks: MakeRanks) -> None:
    for whole, added in make_ranks("shm", 2).run(cases.accumulated):
        torch.testing.assert_close(added, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heap", ["threads", "shm"])
def test_two_micro_batches_in_flight(make_ranks: MakeRanks, heap: str) -> None:
    """Outputs are equal bit for bit; gradients are close, since threads add them in the order of their arrival."""
    for one_by_one, at_once, forwards in make_ranks(heap, 2).run(cases.two_in_flight):
        assert forwards == 12
        for name, expected in one_by_one.items():
            exact = name.startswith(("out", "x "))
            torch.testing.assert_close(at_once[name], expected, **(BITWISE if exact else {"rtol": 1e-5, "atol": 1e-5}))
