"""Every heap runs this suite: dispatch, combine and both backwards against the plain-torch reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import HEAPS
from support.ranks import Ranks
from support.rounds import full_round, rounds_in_a_row
from support.routing import make_spec

SIZES = (1, 2, 3, 4, 7)
MakeRanks = Callable[[str, int], Ranks]


def tokens_for(size: int, most: int = 12) -> list[int]:
    """Return different token counts per rank, including 0 and the maximum."""
    return [(5 * r + most) % (most + 1) if size > 1 else most for r in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heap", HEAPS)
class TestHeap:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_matches_reference(self, make_ranks: MakeRanks, heap: str, size: int, dtype: torch.dtype) -> None:
        spec = make_spec(size, dtype=dtype)
        make_ranks(heap, size).run(full_round, spec, tokens_for(size), 1, "random")

    @pytest.mark.parametrize("kind", ["topk", "one_expert"])
    def test_other_routings(self, make_ranks: MakeRanks, heap: str, size: int, kind: str) -> None:
        make_ranks(heap, size).run(full_round, make_spec(size), tokens_for(size), 2, kind)

    def test_no_tokens_anywhere(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        make_ranks(heap, size).run(full_round, make_spec(size), [0] * size, 3, "random")

    def test_scattered_placement(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        spec = make_spec(size, placement=[(e * 5 + 2) % size for e in range(9)])
        make_ranks(heap, size).run(full_round, spec, tokens_for(size), 4, "random")

    def test_topk_equals_experts(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        make_ranks(heap, size).run(full_round, make_spec(size, num_topk=9), tokens_for(size), 5, "topk")

    def test_drop_beyond_capacity(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        spec = make_spec(size, capacity_factor=0.4, overflow="drop")
        make_ranks(heap, size).run(full_round, spec, [12] * size, 6, "topk")

    def test_drops_on_a_used_buffer(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        """A row dropped now adds nothing that an earlier round left in the windows."""
        spec = make_spec(size, capacity_factor=0.4, overflow="drop")
        make_ranks(heap, size).run(rounds_in_a_row, spec, [12] * size, [6, 7, 8], "topk")

    def test_two_runs_are_bitwise_equal(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        args = (make_spec(size, dtype=torch.bfloat16, hidden=136), tokens_for(size), 7, "random")
        ranks = make_ranks(heap, size)
        assert ranks.run(full_round, *args) == ranks.run(full_round, *args)

    def test_thread_teams_change_no_bit(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        args = (make_spec(size), tokens_for(size), 8, "random")
        ranks = make_ranks(heap, size)
        assert ranks.run(full_round, *args, 3) == ranks.run(full_round, *args, 1)


@pytest.mark.parametrize("num_topk", range(1, 11))
def test_every_number_of_experts_per_token(make_ranks: MakeRanks, num_topk: int) -> None:
    """Every top-k works; common values have specialised sorting code."""
    make_ranks("threads", 3).run(full_round, make_spec(3, num_experts=11, num_topk=num_topk), [12] * 3, 9, "random")


def test_heaps_agree_bitwise(make_ranks: MakeRanks) -> None:
    args = (make_spec(3, dtype=torch.bfloat16), [12, 0, 5], 9, "random")
    assert make_ranks("threads", 3).run(full_round, *args) == make_ranks("shm", 3).run(full_round, *args)
