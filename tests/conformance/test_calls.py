"""Options of a single call: a smaller bound, narrow ids, fewer rows of y, and combine's output memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance import cases_call_options as cases
from conftest import CPU_HEAPS, HEAPS
from support.ranks import Ranks
from support.routing import make_spec

MakeRanks = Callable[[str, int], Ranks]
UNEVEN = [0, 0, 0, 0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("heap", HEAPS)
class TestBoundOfTheCall:
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize("max_tokens", [1, 5, 12])
    def test_matches_reference(self, make_ranks: MakeRanks, heap: str, size: int, max_tokens: int) -> None:
        spec = make_spec(size, placement=UNEVEN if size == 3 else None)
        make_ranks(heap, size).run(cases.bounded_rounds, spec, [max_tokens, None, max_tokens])

    def test_drops_at_the_smaller_capacity(self, make_ranks: MakeRanks, heap: str) -> None:
        spec = make_spec(3, capacity_factor=0.4, overflow="drop", placement=UNEVEN)
        make_ranks(heap, 3).run(cases.bounded_rounds, spec, [5, None, 5], True)

    def test_handles_of_several_bounds(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(cases.handles_of_several_bounds, make_spec(3, placement=UNEVEN))

    def test_ranks_that_disagree_are_refused(self, make_ranks: MakeRanks, heap: str) -> None:
        for rank, text in enumerate(make_ranks(heap, 3).run(cases.disagreeing, 1)):
            assert text.startswith("ConfigMismatch: "), text
            assert "max_tokens: got 5 on rank 1, expected 4" in text or rank == 1 or "concerning rank" in text


@pytest.mark.parametrize("heap", CPU_HEAPS)
class TestBoundOfTheCallOnTheCpu:
    def test_more_tokens_than_the_bound(self, make_ranks: MakeRanks, heap: str) -> None:
        texts = make_ranks(heap, 3).run(cases.refused_dispatch, 1, 4, 5)
        assert texts[1].startswith("TooManyTokens: x: got 5 tokens, expected at most max_tokens = 4")
        for text in texts[::2]:
            assert text.startswith("TooManyTokens:")
            assert "rank 1 got 5 tokens, expected at most 4" in text

    @pytest.mark.parametrize("bound", [0, 13, -1, True, 4.0, "4"])
    def test_no_bound_at_all(self, make_ranks: MakeRanks, heap: str, bound: Any) -> None:
        texts = make_ranks(heap, 3).run(cases.refused_dispatch, 1, bound, 3)
        assert texts[1].startswith(f"InvalidInput: max_tokens: got {bound!r}, expected an integer in [1, "), texts[1]
        assert all("rank 1 refused its input" in text for text in texts[::2])

    def test_overflow_is_raised_at_the_smaller_capacity(self, make_ranks: MakeRanks, heap: str) -> None:
        """Rank 0 has six experts and their capacity; 4 tokens a rank overflow it, 12 do not."""
        for text in make_ranks(heap, 3).run(cases.overflowing, "raise", UNEVEN):
            assert text.startswith("CapacityOverflow:")
            assert "rank 0 would receive 12 rows, expected at most its capacity of 10" in text

    def test_retry_makes_room_for_the_bound_alone(self, make_ranks: MakeRanks, heap: str) -> None:
        rooms = make_ranks(heap, 3).run(cases.overflowing, "retry", UNEVEN)
        spec = make_spec(3, capacity_factor=0.4, placement=UNEVEN)
        assert rooms[0] == [12, 12, spec.capacity(0)]
        assert rooms[1] == [spec.capacity(1, 4), spec.capacity(1, 4), spec.capacity(1)]


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64], ids=str)
def test_narrow_ids_are_read_as_they_lie(make_ranks: MakeRanks, heap: str, idx_dtype: torch.dtype) -> None:
    make_ranks(heap, 3).run(cases.ids_as_they_lie, idx_dtype)


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("rows_to_spare", [0, 1])
def test_fewer_rows(make_ranks: MakeRanks, heap: str, rows_to_spare: int, num_threads: int) -> None:
    make_ranks(heap, 3).run(cases.fewer_rows, rows_to_spare, num_threads)


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("op", ["combine", "combine_backward", "dispatch_backward"])
def test_too_few_rows_are_refused_everywhere(make_ranks: MakeRanks, heap: str, op: str) -> None:
    texts = make_ranks(heap, 3).run(cases.too_few_rows, 1, op, heap != "loopback")
    if heap != "loopback":
        assert texts[1].startswith("InvalidInput:")
        assert "y: got 11 rows, expected at least the 12 that were received" in texts[1]
        assert all("rank 1 refused its input: got 11, expected 12" in text for text in texts[::2])
    for text in texts:
        assert text.startswith(("InvalidInput:", "GroupPoisoned:")), text


@pytest.mark.parametrize("heap", HEAPS)
def test_out_may_lie_anywhere(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks(heap, 2).run(cases.outs)
