"""What a layer counts: its router's choices, rows that did not fit, forwards, and whom it waited for."""

from __future__ import annotations

from collections.abc import Callable

import cases_metrics as cases
import pytest
import torch
from cases_layer import config, inputs_for
from harness import Ranks

from moe_rt import MoELayer

MakeRanks = Callable[[str, int], Ranks]


def test_counts_add_up(make_ranks: MakeRanks) -> None:
    for snapshot, expected in make_ranks("shm", 2).run(cases.counted):
        assert snapshot.tokens_per_expert == expected
        assert sum(expected) == 2 * 10 * cases.TOPK
        assert (snapshot.forwards, snapshot.rows_dropped) == (2, 0)


def test_dropped_rows_are_counted(make_ranks: MakeRanks) -> None:
    """All tokens of both ranks go to rank 0, which has room for a part."""
    assert make_ranks("shm", 2).run(cases.dropped) == [(2 * cases.LOST, 2), (0, 2)]


def test_counts_of_a_layer_that_was_made_in_inference_mode() -> None:
    """Outside of that mode nothing may change what was made in it."""
    with torch.inference_mode():
        layer = MoELayer(config())
    with torch.no_grad():
        layer(inputs_for(0, 4))
    assert layer.metrics.snapshot().forwards == 1


@pytest.mark.parametrize("late", [0, 1])
def test_waiting_is_charged_to_the_late_peer(make_ranks: MakeRanks, late: int) -> None:
    """And not once more to those that were waited for after it."""
    waited = make_ranks("shm", 2).run(cases.one_rank_is_late, late)[1 - late]
    late_ns = cases.LATE_S * 1e9
    assert 0.5 * late_ns < waited[late] < 5 * late_ns
    assert waited[1 - late] < 0.2 * late_ns
