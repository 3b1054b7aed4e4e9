"""The engine and the reference agree on random shapes and routings of everything a caller may pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ranks import Ranks
from support.rounds import full_round
from support.routing import make_spec

from moe_rt.config.spec import BufferSpec


@st.composite
def rounds(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[BufferSpec, list[int], int, str, int]:
    size = draw(st.sampled_from(sizes))
    num_experts = draw(st.integers(size, 13))
    more = num_experts - size
    extra = draw(st.lists(st.integers(0, size - 1), min_size=more, max_size=more))
    scattered = draw(st.permutations([*range(size), *extra]))
    most = draw(st.integers(1, 9))
    spec = make_spec(
        size,
        num_max_tokens_per_rank=most,
        hidden=draw(st.sampled_from([1, 3, 16, 31, 32, 65, 100])),
        num_topk=draw(st.integers(1, num_experts)),
        num_experts=num_experts,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])),
        placement=draw(st.sampled_from([None, scattered])),
        capacity_factor=draw(st.sampled_from([None, 0.3, 1.0])),
        overflow="drop",
    )
    tokens = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
    kind = draw(st.sampled_from(["random", "topk", "one_expert"]))
    return spec, tokens, draw(st.integers(0, 2**16)), kind, draw(st.sampled_from([1, 3]))


@pytest.mark.parametrize(("heap", "sizes", "examples"), [("threads", (1, 2, 3, 5), 120), ("shm", (2, 3), 40)])
def test_engine_agrees_with_reference(
    make_ranks: Callable[[str, int], Ranks], heap: str, sizes: tuple[int, ...], examples: int
) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(rounds(sizes))
    def check(drawn: tuple[BufferSpec, list[int], int, str, int]) -> None:
        make_ranks(heap, drawn[0].num_ranks).run(full_round, *drawn)

    check()
