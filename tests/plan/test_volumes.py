"""Rows, bytes and memory that the planner computes equal those of real routing and real buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import ThreadRanks

from moe_rt import Buffer
from moe_rt.config.options import BufferOptions
from moe_rt.config.placement import Placement
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.errors import InvalidConfig
from moe_rt.lab.bench import crossing, traffic
from moe_rt.lab.bench.cases import Case
from moe_rt.plan.distinct import distinct, distinct_limited
from moe_rt.plan.memory import buffer_memory, deepep_low_latency_bytes, hybridep_bytes
from moe_rt.plan.routing import draw, popularity
from moe_rt.plan.volumes import count, expected, link_bytes


def routed(tokens: int, ranks: int, topk: int, experts: int, seed: int, sigma: float = 0.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [draw(rng, tokens, topk, popularity(experts, sigma)) for _ in range(ranks)]


@pytest.mark.parametrize(("units", "experts", "topk"), [(8, 256, 8), (3, 16, 4), (5, 7, 2), (1, 8, 8), (4, 4, 1)])
def test_distinct_units_agree_with_counts(units: int, experts: int, topk: int) -> None:
    rows = count(
        routed(4000, units, topk, experts, seed=1), Placement.contiguous(experts, units), Topology.one_node(units)
    )
    assert rows.to_ranks == pytest.approx(distinct(units, experts, topk), abs=0.02)


def test_group_limits_reach_more_nodes_than_a_hypergeometric_says() -> None:
    assert distinct_limited(8, 256, 8, groups=8, kept=4) == pytest.approx(3.98, abs=0.01)
    assert distinct_limited(4, 256, 8, groups=4, kept=4) == distinct(4, 256, 8)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize(("ranks", "nodes", "experts", "topk"), [(4, 2, 16, 4), (6, 3, 13, 3), (4, 1, 8, 2)])
def test_bytes_of_recorded_routing_equal_the_benchmarks(
    ranks: int, nodes: int, experts: int, topk: int, op: str
) -> None:
    case = Case(op=op, ranks=ranks, tokens=37, hidden=64, topk=topk, experts=experts, nodes=nodes, heap="ucx")
    ids = routed(37, ranks, topk, experts, seed=2, sigma=1.0)
    rows = count(ids, Placement.contiguous(experts, ranks), case.topology)
    own = traffic.count(case, [torch.from_numpy(each) for each in ids])
    assert rows.received.tolist() == [rank.copies for rank in own]
    assert (rows.visits.sum(0) - np.diag(rows.visits)).tolist() == [rank.guests for rank in own]
    crossed = crossing.count_rows(case, [torch.from_numpy(each) for each in ids])
    for route, unit in (("flat", "rank"), ("two_level", "node")):
        sent = link_bytes(rows, case.row_bytes, route, op)
        there = crossed[unit].sum(1) if op == "dispatch" else crossed[unit].sum(0)
        assert sent.far_sent.tolist() == (case.row_bytes * there).tolist()
        assert sent.far_received.sum() == sent.far_sent.sum()
        assert sent.near_received.sum() == sent.near_sent.sum()


def test_every_row_arrives_once_by_either_route() -> None:
    """Rows that a rank receives over its node are its visits, less what the network brings to it itself."""
    topology = Topology((0, 0, 1, 1))
    rows = count(routed(50, 4, 3, 16, seed=3), Placement.contiguous(16, 4), topology)
    flat, two = (link_bytes(rows, 1, route) for route in ("flat", "two_level"))
    assert two.far_sent.sum() < flat.far_sent.sum()
    assert flat.near_sent.sum() + flat.far_sent.sum() + flat.own == flat.logical


@pytest.mark.parametrize(("op", "sent", "received"), [("dispatch", 3, 2), ("combine", 2, 3)])
def test_the_rank_of_the_same_index_forwards(op: str, sent: int, received: int) -> None:
    """Rank 1 sends to rank 2 through rank 3, the second one of that node; the row returns the same way."""
    none = np.zeros((0, 1), dtype=np.int64)
    rows = count([none, np.array([[2]]), none, none], Placement.contiguous(4, 4), Topology((0, 0, 1, 1)))
    found = link_bytes(rows, 10, "two_level", op)
    assert found.near_sent.tolist() == [10.0 * (rank == sent) for rank in range(4)]
    assert found.near_received.tolist() == [10.0 * (rank == received) for rank in range(4)]


def test_the_rank_of_the_same_index_forwards_if_nodes_are_interleaved() -> None:
    """Rank 2, the second one of its node, sends to rank 1 through rank 3."""
    none = np.zeros((0, 1), dtype=np.int64)
    rows = count([none, none, np.array([[1]]), none], Placement.contiguous(4, 4), Topology((0, 1, 0, 1)))
    found = link_bytes(rows, 10, "two_level")
    assert (found.near_sent.tolist(), found.near_received.tolist()) == ([0, 0, 0, 10], [0, 10, 0, 0])


def test_expected_rows_are_means() -> None:
    topology = Topology((0, 0, 1))
    mean = expected(3000, 2, 10, topology)
    rows = count(routed(3000, 3, 2, 10, seed=4), Placement.contiguous(10, 3), topology)
    assert rows.copies == pytest.approx(mean.copies, rel=0.1)
    assert rows.visits == pytest.approx(mean.visits, rel=0.1)
    assert rows.node_visits == pytest.approx(mean.node_visits, rel=0.1)


SIZES = st.fixed_dictionaries(
    {
        "num_max_tokens_per_rank": st.integers(1, 3000),
        "hidden": st.integers(1, 8192),
        "num_topk": st.integers(1, 8),
        "num_experts": st.integers(16, 300),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
        "layout": st.sampled_from(["experts", "tokens"]),
    }
)


@settings(max_examples=300, deadline=None)
@given(sizes=SIZES, nodes=st.lists(st.integers(1, 4), min_size=1, max_size=3), factor=st.none() | st.floats(0.1, 4.0))
def test_symmetric_memory_follows_the_published_formula(sizes: dict, nodes: list[int], factor: float | None) -> None:
    topology = Topology(tuple(n for n, ranks in enumerate(nodes) for _ in range(ranks)))
    options = BufferOptions(capacity_factor=factor, route="flat")
    memory = buffer_memory(topology, "shm", options, **sizes)
    ranks, tokens = topology.num_ranks, sizes["num_max_tokens_per_rank"]
    topk, experts = sizes["num_topk"], sizes["num_experts"]
    item = sizes["dtype"].itemsize
    row, partials, weight = -(-sizes["hidden"] * item // 64) * 64, min(topk, ranks), 8 if item == 8 else 4
    windows = 4 * experts + 8 * (ranks + 1) + 16 * tokens * partials + (16 + weight) * tokens * topk
    windows += tokens * row + tokens * partials * row + weight * tokens * topk
    least = 128 * (70 + 2 * ranks) + 16 * ranks + 2 * windows
    assert least <= memory.symmetric <= least + 4096 * 24  # regions are rounded up
    spec = BufferSpec.make(topology, options, **sizes)
    assert memory.received >= spec.capacity(0) * sizes["hidden"] * item


def sizes_of_a_buffer(group: Any, arguments: dict[str, Any]) -> tuple[int, int, int]:
    """Return the bytes of a buffer's segment, of what a dispatch returns at full capacity, and of its plans."""
    with Buffer(group, **(arguments | {"heap": "threads"})) as buffer:
        tokens, topk = arguments["num_max_tokens_per_rank"], arguments["num_topk"]
        x = torch.zeros(tokens, arguments["hidden"], dtype=arguments["dtype"])
        topk_idx = torch.arange(topk).expand(tokens, topk)
        recv_x, weights, handle = buffer.dispatch(x, topk_idx, torch.ones(tokens, topk))
        received = sum(t.numel() * t.itemsize for t in (recv_x, weights, handle.offs))
        return buffer.num_bytes, received, sum(t.numel() * t.itemsize for t in (handle.recv_plan, handle.send_plan))


@pytest.mark.parametrize("route", ["flat", "two_level"])
@pytest.mark.parametrize("layout", ["experts", "tokens"])
def test_memory_equals_that_of_a_real_buffer(route: str, layout: str) -> None:
    for tokens, hidden, topk, experts in ((1, 1, 1, 4), (77, 100, 3, 9), (128, 2048, 8, 32)):
        sizes = dict(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, num_experts=experts)
        sizes |= dict(dtype=torch.bfloat16, layout=layout)
        topology = Topology((0, 0, 1, 1))
        options = BufferOptions(route=route, capacity_factor=2.5, overflow="drop")
        want = [buffer_memory(topology, "threads", options, rank=r, **sizes) for r in range(4)]
        got = ThreadRanks(4, nodes=topology.nodes).run(sizes_of_a_buffer, sizes | options.arguments())
        assert [(memory.symmetric, memory.received, memory.handle) for memory in want] == got


def test_other_libraries_sizes_are_the_published_ones() -> None:
    assert deepep_low_latency_bytes(128, 7168, 8, 288) / 1e9 == pytest.approx(2.15, rel=0.01)
    assert deepep_low_latency_bytes(1024, 7168, 8, 256) / 1e9 == pytest.approx(15.3, rel=0.01)
    assert hybridep_bytes(4096, 7168, 8, 2, 16) > hybridep_bytes(4096, 7168, 8, 1, 16)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("experts", lambda: distinct(12, 8, 2)),
        ("topk", lambda: distinct(4, 8, 9)),
        ("experts", lambda: deepep_low_latency_bytes(128, 7168, 12, 128)),
        ("row_bytes", lambda: link_bytes(expected(1, 1, 2, Topology.one_node(2)), 0)),
        ("rank", lambda: buffer_memory(Topology.one_node(2), rank=2, num_max_tokens_per_rank=1, hidden=1)),
        ("heap", lambda: buffer_memory(Topology.one_node(2), "disk", num_max_tokens_per_rank=1, hidden=1)),
    ],
)
def test_senseless_sizes_are_refused_by_name(field: str, call) -> None:
    with pytest.raises(InvalidConfig, match=f"^{field}: got .*expected"):
        call()


@pytest.mark.parametrize(
    "nodes", [(0, 0), (0, 1), (0, 1, 2), (0, 0, 1), (0, 0, 1, 1), (0, 0, 0, 1), (0,) * 8 + (1,) * 8]
)
@pytest.mark.parametrize(("topk", "experts"), [(1, 16), (2, 16), (4, 32), (8, 256)])
def test_auto_takes_two_levels_where_the_planner_counts_fewer_bytes(
    nodes: tuple[int, ...], topk: int, experts: int
) -> None:
    """The rule of route="auto" asks only for nodes that ranks share; with K = 1 both routes cross alike."""
    topology = Topology(nodes)
    rows = expected(64, topk, experts, topology)
    crossing = [link_bytes(rows, 2.0, route).far_sent.sum() for route in ("flat", "two_level")]
    takes_two_levels = topology.num_nodes > 1 and topology.shares_nodes
    assert crossing[1] <= crossing[0] * (1 + 1e-9)
    assert bool(crossing[1] < crossing[0] * (1 - 1e-6)) is (takes_two_levels and topk > 1)
