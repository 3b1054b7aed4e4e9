"""The planner's memory equals that of real buffers, to the byte, for random sizes and options on each heap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks

from moe_rt import Buffer, Tuning
from moe_rt.config.options import ALIGNMENTS, BufferOptions
from moe_rt.config.topology import Topology
from moe_rt.plan.memory import buffer_memory

WIDE = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CODES = [None, torch.float8_e4m3fn, torch.int8]


Drawn = tuple[Topology, dict[str, Any], dict[str, Any]]
NODES = st.lists(st.integers(1, 2), min_size=1, max_size=2)  # ranks of each
ANY_NODES = NODES.map(lambda nodes: Topology(tuple(n for n, ranks in enumerate(nodes) for _ in range(ranks))))


@st.composite
def configurations(draw: st.DrawFn, topologies: st.SearchStrategy[Topology] = ANY_NODES) -> Drawn:
    """Draw a topology, sizes and options that fit together."""
    topology = draw(topologies)
    experts, layout = draw(st.integers(4, 70)), draw(st.sampled_from(["experts", "tokens"]))
    sizes = dict(
        num_max_tokens_per_rank=draw(st.integers(1, 200)),
        hidden=draw(st.integers(1, 700)),
        num_topk=draw(st.integers(1, min(8, experts))),
        num_experts=experts,
        dtype=draw(st.sampled_from(WIDE)),
        layout=layout,
        expert_alignment=draw(st.sampled_from(ALIGNMENTS)) if layout == "experts" else 1,
    )
    codes = st.sampled_from(CODES) if sizes["dtype"] is not torch.float64 else st.none()
    ranks = topology.num_ranks
    others = st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), min_size=experts - ranks,
                                                            max_size=experts - ranks))])  # fmt: skip
    tuning = Tuning(pushed_rows=draw(st.integers(0, 64)), pushed_tokens=draw(st.integers(0, 64)))
    options = dict(
        capacity_factor=draw(st.none() | st.floats(0.1, 4.0)),
        overflow="drop",
        dispatch_dtype=draw(codes),
        combine_dtype=draw(codes),
        route=draw(st.sampled_from(["auto", "flat", "two_level"])),
        sums=draw(st.sampled_from(["ranked", "invariant"])) if layout == "experts" else "ranked",
        placement=draw(st.none() | others),
        tuning=tuning,
    )
    return topology, sizes, options


def real(group: Any, sizes: dict[str, Any], options: dict[str, Any], heap: str, device: Any) -> list[int]:
    """Return the bytes of a buffer's segment, of what a dispatch returns at full capacity, and of its plans."""
    with Buffer(group, **sizes, **options, heap=heap) as buffer:
        tokens, topk = sizes["num_max_tokens_per_rank"], sizes["num_topk"]
        x = torch.zeros(tokens, sizes["hidden"], dtype=sizes["dtype"], device=device)
        topk_idx = torch.arange(topk, device=device).expand(tokens, topk)
        recv_x, weights, handle = buffer.dispatch(x, topk_idx, torch.ones(tokens, topk, device=device))
        parts = ((recv_x, weights, handle.offs), (handle.recv_plan, handle.send_plan))
        return [buffer.num_bytes, *(sum(t.numel() * t.itemsize for t in part) for part in parts)]


def planned(topology: Topology, sizes: dict[str, Any], options: dict[str, Any], heap: Any) -> list[list[int]]:
    made = [
        buffer_memory(topology, heap, BufferOptions(**options), rank=rank, **sizes)
        for rank in range(topology.num_ranks)
    ]
    return [[memory.symmetric, memory.received, memory.handle] for memory in made]


def real_many(group: Any, drawn: list[Drawn], heap: str) -> list[list[int]]:
    return [real(group, sizes, options, heap, "cpu") for _, sizes, options in drawn]


MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(drawn=configurations())
def test_threads(drawn: Drawn) -> None:
    topology, sizes, options = drawn
    ranks = ThreadRanks(topology.num_ranks, nodes=topology.nodes)
    assert ranks.run(real, sizes, options, "threads", "cpu") == planned(topology, sizes, options, "threads")


@settings(MANY, max_examples=40)
@given(drawn=configurations())
def test_ranks_of_a_gpu(drawn: Drawn) -> None:
    topology, sizes, options = drawn
    ranks = ThreadRanks(topology.num_ranks, EmulatedGpu(), nodes=topology.nodes)
    assert ranks.run(real, sizes, options, "loopback", "cpu") == planned(topology, sizes, options, "loopback")


@pytest.mark.parametrize("heap", ["shm", "ucx"])
def test_processes(make_ranks: Any, heap: Any) -> None:
    if heap == "ucx":
        pytest.importorskip("libucx")
    ranks = make_ranks("shm", 2)

    @settings(MANY, max_examples=3)
    @given(drawn=st.lists(configurations(st.just(Topology.one_node(2))), min_size=30, max_size=30))
    def check(drawn: list[Drawn]) -> None:
        expected = [planned(topology, sizes, options, heap) for topology, sizes, options in drawn]
        assert ranks.run(real_many, drawn, heap) == [list(each) for each in zip(*expected, strict=True)]

    check()
