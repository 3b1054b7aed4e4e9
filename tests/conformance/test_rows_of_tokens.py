"""layout="tokens" on every heap: a row for each token that visits a rank, with its local experts and their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance import cases_rows_of_tokens as cases
from conftest import CPU_HEAPS, HEAPS
from support.ranks import Ranks
from support.rounds import full_round, rounds_in_a_row
from support.routing import make_spec
from test_conformance import tokens_for

from moe_rt.config.spec import BufferSpec

MakeRanks = Callable[[str, int], Ranks]
FP8 = torch.float8_e4m3fn
UNEVEN = [0, 0, 0, 0, 0, 0, 1, 1, 2]


def spec_of(size: int, **changes: Any) -> BufferSpec:
    return make_spec(size, layout="tokens", **changes)


@pytest.mark.parametrize("heap", HEAPS)
class TestHeap:
    @pytest.mark.parametrize("size", [1, 2, 3, 7])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    def test_matches_reference(self, make_ranks: MakeRanks, heap: str, size: int, dtype: torch.dtype) -> None:
        make_ranks(heap, size).run(full_round, spec_of(size, dtype=dtype), tokens_for(size), 1, "random")

    @pytest.mark.parametrize("kind", ["topk", "one_expert"])
    def test_other_routings(self, make_ranks: MakeRanks, heap: str, kind: str) -> None:
        make_ranks(heap, 3).run(full_round, spec_of(3, placement=UNEVEN), tokens_for(3), 2, kind)

    def test_no_tokens_anywhere(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(full_round, spec_of(3), [0] * 3, 3, "random")

    def test_topk_equals_experts(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(full_round, spec_of(3, num_topk=9), tokens_for(3), 5, "topk")

    @pytest.mark.parametrize("factor", [0.1, 0.3])
    def test_drop_beyond_capacity(self, make_ranks: MakeRanks, heap: str, factor: float) -> None:
        spec = spec_of(3, capacity_factor=factor, overflow="drop")
        make_ranks(heap, 3).run(rounds_in_a_row, spec, [12] * 3, [6, 7, 8], "topk")

    @pytest.mark.parametrize(("there", "home"), [(FP8, FP8), (torch.int8, None)])
    def test_coded_rows(self, make_ranks: MakeRanks, heap: str, there: Any, home: Any) -> None:
        spec = spec_of(2, hidden=300, dtype=torch.bfloat16, dispatch_dtype=there, combine_dtype=home)
        make_ranks(heap, 2).run(full_round, spec, [12, 7], 3, "random")

    def test_bound_of_the_call(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(cases.bounded_round, spec_of(3), 5)

    def test_teams_change_no_bit(self, make_ranks: MakeRanks, heap: str) -> None:
        args = (spec_of(3, dtype=torch.bfloat16), tokens_for(3), 8, "random")
        ranks = make_ranks(heap, 3)
        assert ranks.run(full_round, *args, 3) == ranks.run(full_round, *args, 1)

    def test_equals_the_layout_of_experts(self, make_ranks: MakeRanks, heap: str) -> None:
        """A layer of linear experts over either layout has the same output and gradients in fp64, up to rounding."""
        make_ranks(heap, 3).run(cases.both_layouts)

    @pytest.mark.parametrize("layout", ["tokens", "experts"])
    def test_weights_where_there_are_none(self, make_ranks: MakeRanks, heap: str, layout: str) -> None:
        """Weights passed although experts have applied them, or missing although they have not, raise on every rank."""
        texts = make_ranks(heap, 3).run(cases.wrong_weights, layout, 1)
        got = f'recv_weights: got {"weights" if layout == "tokens" else "NoneType"} with layout="{layout}"'
        assert texts[1].startswith(f"InvalidInput: {got}"), texts
        ended = ("InvalidInput: ", "GroupPoisoned: ") if heap == "loopback" else ("InvalidInput: ",)
        assert all(text.startswith(ended) for text in texts), texts


def test_capacity_is_of_tokens() -> None:
    """The worst case is every token of every rank, once."""
    assert [spec_of(3, placement=UNEVEN).capacity(rank) for rank in range(3)] == [36, 36, 36]
    assert spec_of(3, num_topk=1, capacity_factor=0.5).capacity(0) == 6


@pytest.mark.parametrize("layout", ["experts", "tokens"])
def test_gather_writes_each_token_once(make_ranks: MakeRanks, layout: str) -> None:
    """gather writes each token once, and not once for each of its experts as in layout="experts"."""
    for written, came, copies in make_ranks("shm", 2).run(cases.bytes_written, layout):
        assert came < copies
        assert written == (came if layout == "tokens" else copies) * 8192 * 2


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_retry_makes_room_for_what_came(make_ranks: MakeRanks, heap: str) -> None:
    for capacity, needed in make_ranks(heap, 3).run(cases.retried):
        assert capacity == max(needed, spec_of(3, capacity_factor=0.1).capacity(0))


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_overflow_says_how_many_tokens(make_ranks: MakeRanks, heap: str) -> None:
    for text in make_ranks(heap, 3).run(cases.overflowing):
        assert text.startswith("CapacityOverflow: ")
        assert "rank 0 would receive 36 rows, expected at most its capacity of 4" in text


@pytest.mark.parametrize("op", ["combine", "combine_tokens_backward", "dispatch_backward"])
@pytest.mark.parametrize("name", ["row", "k", "num_rows", "num_pulled", "mark"])
@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_an_overwritten_plan_is_not_followed(make_ranks: MakeRanks, heap: str, name: str, op: str) -> None:
    for rank, text in enumerate(make_ranks(heap, 3).run(cases.overwritten, 1, name, op)):
        assert text.startswith("InvalidInput: "), text
        assert "got plans that no dispatch of this buffer" in text or rank != 1


@pytest.mark.parametrize("heap", HEAPS)
def test_fewer_rows_than_came(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, 3).run(cases.too_few_rows, 1)
    assert any(text.startswith("InvalidInput: ") for text in texts), texts
    assert all(text != "no error" for text in texts)


def test_ranks_that_disagree_are_refused(make_ranks: MakeRanks) -> None:
    for text in make_ranks("threads", 2).run(cases.other_layouts):
        assert text.startswith("ConfigMismatch: layout: got tokens on rank 1, expected experts as on rank 0")


def test_no_such_layout(make_ranks: MakeRanks) -> None:
    first, second = make_ranks("threads", 2).run(cases.no_such_layout)
    assert first.startswith("InvalidConfig: layout: got rows, expected one of ('experts', 'tokens')")
    assert second.startswith("InvalidConfig: rank 0 refused")


def test_counts_of_experts_are_not_those_of_sources() -> None:
    cases.asks_for_rows_of_experts()


def test_each_layout_has_a_backward_of_its_own() -> None:
    cases.backward_of_the_other_layout()


def test_a_layer_takes_rows_of_experts() -> None:
    cases.layer_over_tokens()
