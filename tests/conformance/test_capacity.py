"""overflow="retry" gives the result of unbounded capacity, at the cost of one more dispatch when capacity grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulated_gpu import EmulatedGpu
from support.ranks import Ranks
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


def dispatches(recv_plan: torch.Tensor) -> int:
    """Number of dispatches the buffer has run, including this plan's: the sequence number at the plan's start."""
    return int(recv_plan[2:4].view(torch.int64)[0])


def retried(group: Any, num_tokens: list[int], seed: int, kind: str) -> tuple[list[bytes], list[int], int]:
    """Run a round with little capacity, another that needs no more, and a combine with a handle from before it grew."""
    spec = make_spec(len(num_tokens), capacity_factor=0.2, overflow="retry")
    inputs = make_inputs(spec, num_tokens, seed, kind)
    few = make_inputs(spec, [min(1, n) for n in num_tokens], seed, kind)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        rank, numbers = buffer.rank, []
        mine = [each[rank] for each in (few.xs, few.topk_idx, few.topk_weights)]
        x, weights = mine[0].requires_grad_(), mine[2].requires_grad_()
        early = buffer.dispatch(x, mine[1], weights)
        for _ in range(2):
            recv_x, _, handle = buffer.dispatch(inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank])
            numbers.append(dispatches(handle.recv_plan))
            assert len(recv_x) == buffer.capacity
        out = buffer.combine(early[0], early[1], early[2])
        out.sum().backward()
        assert x.grad is not None
        outputs = unbounded_outputs(buffer, inputs)
        return outputs, numbers, buffer.capacity


def unbounded_outputs(buffer: Buffer, inputs: Any) -> list[bytes]:
    rank = buffer.rank
    recv_x, recv_weights, handle = buffer.dispatch(inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank])
    n = int(handle.offs[-1])
    assert int(handle.num_dropped) == 0
    out = buffer.combine(recv_x, recv_weights, handle)
    return [
        t.contiguous().view(torch.uint8).numpy().tobytes() for t in (recv_x[:n], recv_weights[:n], handle.offs, out)
    ]


def unbounded(group: Any, num_tokens: list[int], seed: int, kind: str) -> list[bytes]:
    spec = make_spec(len(num_tokens))
    inputs = make_inputs(spec, num_tokens, seed, kind)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        return unbounded_outputs(buffer, inputs)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_retry_equals_unbounded(make_ranks: MakeRanks, heap: str) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.integers(0, 12), min_size=3, max_size=3),
        st.integers(0, 2**16),
        st.sampled_from(["random", "topk", "one_expert"]),
    )
    def check(num_tokens: list[int], seed: int, kind: str) -> None:
        ranks = make_ranks(heap, 3)
        got, expected = ranks.run(retried, num_tokens, seed, kind), ranks.run(unbounded, num_tokens, seed, kind)
        assert [outputs for outputs, _, _ in got] == expected
        numbers = {tuple(n) for _, n, _ in got}
        assert len(numbers) == 1, "all ranks retried alike"
        first, second = numbers.pop()
        assert second == first + 1, "the room that was made stays"

    check()


def test_cost_of_a_retry(make_ranks: MakeRanks) -> None:
    """A retry costs one more dispatch, and grows the capacity to exactly the rows received."""
    results = make_ranks("threads", 3).run(retried, [12, 12, 12], 1, "one_expert")
    for rank, (_, numbers, capacity) in enumerate(results):
        assert numbers == [3, 4], "dispatch 1 fitted, 2 did not, 3 is its repetition"
        assert capacity == (36 if rank == 0 else make_spec(3, capacity_factor=0.2).capacity(rank))


def test_no_more_room_than_the_worst_case() -> None:
    bounded, unbounded = make_spec(3, capacity_factor=100.0), make_spec(3)
    assert [bounded.capacity(rank) for rank in range(3)] == [unbounded.capacity(rank) for rank in range(3)]


def test_not_on_cuda() -> None:
    spec = make_spec(1, capacity_factor=0.2, overflow="retry")
    with pytest.raises(InvalidConfig, match=r'overflow: got "retry" on CUDA'):
        Buffer(ThreadGroup.make(1, EmulatedGpu())[0], **buffer_kwargs(spec))
