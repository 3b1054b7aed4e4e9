"""expert_alignment on every heap: experts' rows begin at multiples, padding is zero and never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS, HEAPS
from support.ranks import Ranks
from support.rounds import expected_once, full_round, rounds_in_a_row
from support.routing import buffer_kwargs, make_inputs, make_spec
from test_conformance import tokens_for
from torch import Tensor

from moe_rt import Buffer
from moe_rt.errors import CapacityOverflow, InvalidConfig, InvalidInput
from moe_rt.lab.testing.rounds import play

MakeRanks = Callable[[str, int], Ranks]
UNEVEN = [0, 0, 0, 0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("heap", HEAPS)
class TestHeap:
    @pytest.mark.parametrize("size", [1, 2, 3, 7])
    @pytest.mark.parametrize("alignment", [8, 32])
    def test_matches_reference(self, make_ranks: MakeRanks, heap: str, size: int, alignment: int) -> None:
        make_ranks(heap, size).run(
            full_round, make_spec(size, expert_alignment=alignment), tokens_for(size), 1, "random"
        )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
    def test_dtypes(self, make_ranks: MakeRanks, heap: str, dtype: torch.dtype) -> None:
        spec = make_spec(3, expert_alignment=16, dtype=dtype, placement=UNEVEN)
        make_ranks(heap, 3).run(full_round, spec, tokens_for(3), 2, "topk")

    def test_large_blocks(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 2).run(full_round, make_spec(2, expert_alignment=128), [12, 5], 2, "topk")

    @pytest.mark.parametrize("tokens", [[0, 0, 0], [1, 0, 0]])
    def test_hardly_any_tokens(self, make_ranks: MakeRanks, heap: str, tokens: list[int]) -> None:
        make_ranks(heap, 3).run(full_round, make_spec(3, expert_alignment=8), tokens, 3, "one_expert")

    @pytest.mark.parametrize("factor", [0.1, 0.4])
    def test_drops_rows_and_no_padding(self, make_ranks: MakeRanks, heap: str, factor: float) -> None:
        spec = make_spec(3, expert_alignment=8, capacity_factor=factor, overflow="drop", placement=UNEVEN)
        make_ranks(heap, 3).run(rounds_in_a_row, spec, [12] * 3, [6, 7, 8], "topk")

    def test_coded_rows(self, make_ranks: MakeRanks, heap: str) -> None:
        codes = {"dispatch_dtype": torch.float8_e4m3fn, "combine_dtype": torch.int8}
        spec = make_spec(2, expert_alignment=8, hidden=300, dtype=torch.bfloat16, **codes)
        make_ranks(heap, 2).run(full_round, spec, [12, 7], 3, "random")

    def test_teams_change_no_bit(self, make_ranks: MakeRanks, heap: str) -> None:
        args = (make_spec(3, expert_alignment=16), tokens_for(3), 8, "random")
        ranks = make_ranks(heap, 3)
        assert ranks.run(full_round, *args, 3) == ranks.run(full_round, *args, 1)

    def test_bound_of_the_call(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(bounded, 5)


def bounded(group: Any, max_tokens: int) -> None:
    spec = make_spec(3, expert_alignment=8)
    inputs = make_inputs(spec, [max_tokens, 0, 3], 4)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        play(buffer, inputs, expected_once(spec, inputs, 4, max_tokens), torch.device("cpu"), max_tokens=max_tokens)


def test_every_expert_begins_at_a_multiple() -> None:
    sizes = {"num_max_tokens_per_rank": 6, "hidden": 4, "num_topk": 1, "num_experts": 3}
    with Buffer(None, dtype=torch.float32, expert_alignment=8, **sizes) as buffer:
        x, idx = torch.ones(6, 4), torch.tensor([[0], [2], [0], [2], [2], [-1]])
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.full((6, 1), 0.5))
        assert buffer.capacity == len(recv_x) == 32  # 6 rows and 3 * 7 rows of padding, rounded up
        assert handle.offs.tolist() == [8, 8, 16]
        assert handle.ends.tolist() == [2, 8, 11]
        assert handle.num_recv_tokens_per_expert.tolist() == [2, 0, 3]
        experts = handle.row_experts(len(recv_x)).tolist()
        assert experts == [0] * 2 + [-1] * 6 + [2] * 3 + [-1] * 21
        assert [row.sum().item() for row in recv_x[:16]] == [4.0 * (e >= 0) for e in experts[:16]]
        assert recv_weights[:16].tolist() == [0.5 * (e >= 0) for e in experts[:16]]
        assert buffer.combine(recv_x, recv_weights, handle).tolist() == [[0.5] * 4] * 5 + [[0.0] * 4]


@pytest.fixture
def aligned() -> Iterator[Buffer]:
    sizes = {"num_max_tokens_per_rank": 6, "hidden": 4, "num_topk": 2, "num_experts": 3}
    with Buffer(None, dtype=torch.float64, expert_alignment=8, **sizes) as buffer:
        yield buffer


def pair(buffer: Buffer, x: Tensor, weights: Tensor) -> Tensor:
    """Run experts that scale their rows by a distinct number, and padding by NaN, which would show."""
    idx = torch.tensor([[0, 2], [2, -1], [1, 1], [0, 1], [2, 0]])
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
    factors = torch.tensor([1.0, 2.0, 3.0, float("nan")], dtype=x.dtype)[handle.row_experts(len(recv_x)).long()]
    return buffer.combine(recv_x.sin() * factors[:, None], recv_weights, handle)


def test_gradcheck(aligned: Buffer) -> None:
    x, weights = (torch.randn(5, n, dtype=torch.float64, requires_grad=True) for n in (4, 2))
    assert torch.autograd.gradcheck(lambda x, w: pair(aligned, x, w), (x, weights))


def test_compiles_as_one_graph(aligned: Buffer) -> None:
    x, weights = (torch.randn(5, n, dtype=torch.float64, requires_grad=True) for n in (4, 2))
    torch._dynamo.reset()
    got, want = torch.compile(pair, fullgraph=True, backend="aot_eager")(aligned, x, weights), pair(aligned, x, weights)
    torch.testing.assert_close(got, want)
    got_grads, want_grads = (torch.autograd.grad(out.sum(), [x, weights]) for out in (got, want))
    torch.testing.assert_close(got_grads, want_grads)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_room_is_counted_without_padding(make_ranks: MakeRanks, heap: str) -> None:
    """Alignment does not reduce the rows that fit, wherever padding falls; one more overflows, or is retried."""
    make_ranks(heap, 2).run(fills)


def fills(group: Any) -> None:
    spec = make_spec(2, num_experts=2, num_topk=1, capacity_factor=1.0, expert_alignment=8)
    assert spec.capacity(0) == 24  # 12 rows, 7 of padding, rounded up
    for overflow in ("raise", "retry"):
        kwargs = buffer_kwargs(spec) | {"overflow": overflow}
        with Buffer(group, timeout_s=60.0, **kwargs) as buffer:
            for tokens, fits in ((8, True), (9, False)):  # tokens of each rank, all sent to rank 0: 16 and 18 rows
                x, idx = torch.ones(tokens, spec.hidden), torch.zeros(tokens, 1, dtype=torch.int64)
                weights = torch.ones(tokens, 1)
                if fits or overflow == "retry":
                    recv_x, _, handle = buffer.dispatch(x, idx, weights)
                    assert handle.ends.tolist() == [2 * tokens if buffer.rank == 0 else 0]
                    assert len(recv_x) == buffer.capacity
                else:
                    with pytest.raises(CapacityOverflow, match=r"rank 0 would receive 18 rows, expected .* 17"):
                        buffer.dispatch(x, idx, weights)


@pytest.mark.parametrize("value", [-1, 17, 2**30])  # 16 is the number of rows
def test_overwritten_ends_are_not_followed(value: int) -> None:
    sizes = {"num_max_tokens_per_rank": 6, "hidden": 4, "num_topk": 1, "num_experts": 3}
    with Buffer(None, dtype=torch.float32, expert_alignment=8, **sizes) as buffer:
        idx, weights = torch.tensor([[0], [2]]), torch.ones(2, 1)
        recv_x, recv_weights, handle = buffer.dispatch(torch.ones(2, 4), idx, weights)
        handle.ends[1] = value
        with pytest.raises(InvalidInput, match="got plans that no dispatch of this buffer"):
            buffer.combine(recv_x, recv_weights, handle)


@pytest.mark.parametrize("value", [0, 4, 64, "8", None])
def test_other_alignments_are_refused(value: Any) -> None:
    with pytest.raises(InvalidConfig, match=rf"expert_alignment: got {value}, expected one of"):
        make_spec(1, expert_alignment=value)


def test_rows_of_tokens_are_not_aligned() -> None:
    with pytest.raises(InvalidConfig, match=r'expert_alignment: got 8, expected 1 with layout="tokens"'):
        make_spec(1, expert_alignment=8, layout="tokens")
