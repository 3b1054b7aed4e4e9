"""Ranks on emulated nodes, heap "ucx": the oracle's bits, as on one host, for any placement of ranks, by either
route."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import cases_scaled_rows
from conformance.cases_equal_bits import make_batch, one_rank, splits
from layer import cases_overlap
from nodes.node_ranks import NodeRanks
from support.ranks import ThreadRanks
from support.rounds import chain, full_round, outcome, rounds_in_a_row
from support.routing import buffer_kwargs, make_spec
from test_conformance import tokens_for
from test_depth import STEPS, Batch, random_chain
from torch.distributed.device_mesh import init_device_mesh

from moe_rt import Buffer
from moe_rt.buffer.pending import Pending
from moe_rt.errors import InvalidConfig, InvalidRouting
from moe_rt.lab.testing.rounds import check_bits
from moe_rt.ops import table as ops

LAYOUTS = {"2x2": (2, 2), "3x1": (1, 1, 1), "1+2": (1, 2)}
# tests/faults/test_remote_failures.py also uses these nodes.
FEW_LAYOUTS = ("2x2", "3x1", pytest.param("1+2", marks=pytest.mark.sweep))
PAIRS, MANY_PAIRS = 150, 2000
TO_NEAREST, UPWARD = 0, 0x800  # <fenv.h> of x86-64


@pytest.fixture(scope="module", params=FEW_LAYOUTS)
def ranks(request: pytest.FixtureRequest) -> Iterator[NodeRanks]:
    with closing(NodeRanks(LAYOUTS[request.param])) as made:
        yield made


@pytest.fixture(params=["flat", "two_level"])
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_matches_reference(ranks: NodeRanks, route: str, dtype: torch.dtype) -> None:
    spec = make_spec(ranks.size, route=route, dtype=dtype)
    assert ranks.run(full_round, spec, tokens_for(ranks.size), 1, "random")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_bits(ranks: NodeRanks, route: str, dtype: torch.dtype) -> None:
    """Rows that return one by one have the bits of a single rank, coded ones those of the oracle."""
    batch = make_batch(23, 136, dtype, "random")
    alone = ThreadRanks(1).run(one_rank, batch, {}, [23])[0]
    parts = ranks.run(one_rank, batch, {"route": route}, splits(23, ranks.size))
    for name, got, expected in zip(("out", "grad_x", "grad_weights"), zip(*parts, strict=True), alone, strict=True):
        check_bits(name, torch.cat(got), expected)
    spec = make_spec(ranks.size, route=route, dtype=dtype, sums="invariant", num_topk=9, combine_dtype=torch.int8)
    ranks.run(rounds_in_a_row, spec, tokens_for(ranks.size), [1, 2, 3], "random")


@pytest.mark.parametrize("depth", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_ops_under_way(ranks: NodeRanks, route: str, depth: int) -> None:
    assert ranks.run(random_chain, 80, depth, depth, route) == [depth] * ranks.size


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_layer_takes_halves(ranks: NodeRanks, route: str, num_chunks: int) -> None:
    """Gradients are those of whole ops; the experts' weights have theirs before dispatch's backward ends."""
    for (grads, seen, y), (expected, plain, same) in ranks.run(cases_overlap.by_itself, route, num_chunks):
        torch.testing.assert_close((grads, y), (expected, same), rtol=0, atol=0)
        last_begun, last_ended = (len(seen) - 1 - seen[::-1].index(half) for half in ("_run_first", "_run_second"))
        assert any(name.startswith("experts.") for name in seen[last_begun:last_ended]), seen
        assert num_chunks > 1 or "_run_first" not in plain


def rows_between_the_halves(group: Any, op: str) -> bool:
    """Begin an op, and return True if rows of another node come before the wait for it."""
    size, rank, tokens = group.size(), group.rank(), 64
    sizes = dict(num_max_tokens_per_rank=tokens, hidden=4096, num_topk=1, num_experts=size, dtype=torch.float32)
    with Buffer(group, route="flat", timeout_s=300.0, **sizes) as buffer:
        x, weights = torch.ones(tokens, 4096), torch.ones(tokens, 1)
        idx = torch.full((tokens, 1), (rank + (size + 1) // 2) % size)
        before, until, expected = bytes_received(), time.monotonic() + 60, x.nbytes
        if op != "dispatch":
            rows, recv_weights, handle = buffer.dispatch(x, idx, weights)
            expected *= 2
        if op == "dispatch":
            pending: Any = buffer.dispatch(x, idx, weights, wait=False)
        elif op == "combine":
            pending = buffer.combine(rows, recv_weights, handle, wait=False)
        else:
            given = x, rows, recv_weights, handle.recv_plan, buffer._engine, 0
            pending = Pending(ops.combine_backward_finish, (ops.combine_backward_begin(*given), *given), lambda _: None)
        while bytes_received() - before < expected and time.monotonic() < until:
            time.sleep(0.001)
        came = bytes_received() - before >= expected
        pending.wait()
        return came


def bytes_received() -> int:
    """Return the bytes that this node's interfaces have received."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[1]) for line in lines if not line.strip().startswith("lo:"))


@pytest.mark.parametrize("op", ["dispatch", "combine", "combine_backward"])
def test_rows_come_between_the_halves(ranks: NodeRanks, op: str) -> None:
    """The thread that serves peers asks for rows, or sends them, while the rank computes."""
    assert ranks.run(rows_between_the_halves, op) == [True] * ranks.size


def others_end_first(group: Any, late: int, rounding: int, options: dict[str, Any]) -> int:
    """Run the four ops whole, then such that one rank waits for each only when all others have ended it. Return the
    number of bits that differ."""
    spec = make_spec(group.size(), hidden=512, num_topk=5, route="two_level", **options)
    with Buffer(group, timeout_s=120.0, **buffer_kwargs(spec)) as buffer:
        assert ctypes.CDLL("libm.so.6").fesetround(rounding) == 0  # not of the buffer's threads
        whole, halves = (Batch(buffer, 1) for _ in range(2))
        for _ in STEPS:
            whole.run()
        for _ in STEPS:
            if buffer.rank == late:
                halves.begin()
                group.barrier().wait()
                halves.wait()
            else:
                halves.run()
                group.barrier().wait()
        pairs = zip(whole.values(), halves.values(), strict=True)
        assert ctypes.CDLL("libm.so.6").fesetround(TO_NEAREST) == 0
        return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)


LATE_RANKS = [
    ({}, TO_NEAREST),
    ({"sums": "invariant"}, TO_NEAREST),
    ({"dtype": torch.float64}, TO_NEAREST),
    ({"dtype": torch.bfloat16, "dispatch_dtype": torch.int8, "combine_dtype": torch.float8_e4m3fn}, TO_NEAREST),
    ({}, UPWARD),  # sums are rounded as the caller's are
]


@pytest.mark.parametrize(("options", "rounding"), LATE_RANKS, ids=["raw", "invariant", "fp64", "coded", "upward"])
def test_a_proxy_serves_between_the_halves(ranks: NodeRanks, options: dict[str, Any], rounding: int) -> None:
    """A rank that has begun an op delays none of its clients: they end the op before it waits, with the same bits."""
    for late in (0, ranks.size - 1):
        assert ranks.run(others_end_first, late, rounding, options) == [0] * ranks.size


def refusal_ends_first(group: Any, wrong: int, late: int) -> list[str]:
    """Rank `wrong` passes an invalid expert id, then not. One rank waits after all others. Return the errors."""
    spec, found = make_spec(group.size(), route="two_level"), []
    with Buffer(group, timeout_s=120.0, **buffer_kwargs(spec)) as buffer:
        for expert in (spec.num_experts if buffer.rank == wrong else 0, 0):
            idx = torch.full((4, spec.num_topk), -1)
            idx[:, 0] = expert
            pending = buffer.dispatch(torch.ones(4, spec.hidden), idx, torch.ones(idx.shape), wait=False)
            if buffer.rank == late:
                group.barrier().wait()
            found.append(outcome(pending.wait)[0])
            if buffer.rank != late:
                group.barrier().wait()
    return found


def test_a_refusal_is_passed_on_between_the_halves(ranks: NodeRanks) -> None:
    for wrong, late in ((0, ranks.size - 1), (ranks.size - 1, 0)):
        assert ranks.run(refusal_ends_first, wrong, late) == [[InvalidRouting.__name__, ""]] * ranks.size


@pytest.mark.parametrize("kind", ["topk", "one_expert"])
def test_other_routings(ranks: NodeRanks, route: str, kind: str) -> None:
    ranks.run(full_round, make_spec(ranks.size, route=route, num_topk=9), tokens_for(ranks.size), 2, kind)


def test_a_node_without_tokens(ranks: NodeRanks, route: str) -> None:
    idle = [0 if node == 1 else 9 for node in ranks.node_of]
    ranks.run(rounds_in_a_row, make_spec(ranks.size, route=route), idle, [1, 2], "random")
    ranks.run(full_round, make_spec(ranks.size, route=route), [0] * ranks.size, 3, "random")


def test_drops_scattered_placement_and_lanes(ranks: NodeRanks, route: str) -> None:
    placement = [(e * 5 + 2) % ranks.size for e in range(9)]
    spec = make_spec(ranks.size, route=route, placement=placement, capacity_factor=0.4, overflow="drop")
    ranks.run(rounds_in_a_row, spec, [12] * ranks.size, [6, 7, 8], "topk")
    args = (make_spec(ranks.size, route=route, placement=placement), tokens_for(ranks.size), 8, "random")
    assert ranks.run(full_round, *args, 3) == ranks.run(full_round, *args, 1)


def test_rows_of_tokens_and_coded_rows(ranks: NodeRanks, route: str) -> None:
    size, fp8 = ranks.size, torch.float8_e4m3fn
    ranks.run(full_round, make_spec(size, route=route, layout="tokens"), tokens_for(size), 1, "random")
    coded = make_spec(size, route=route, dtype=torch.bfloat16, hidden=300, dispatch_dtype=fp8, combine_dtype=fp8)
    ranks.run(full_round, coded, tokens_for(size), 3, "random")
    spec = make_spec(size, route=route, dtype=torch.bfloat16)
    ranks.run(cases_scaled_rows.scaled_round, spec, cases_scaled_rows.PLAIN, tokens_for(size), [1, 2])


@pytest.mark.parametrize("pairs", [PAIRS, pytest.param(MANY_PAIRS, marks=pytest.mark.sweep)])
def test_chain(ranks: NodeRanks, route: str, pairs: int) -> None:
    """Chains without a drain, with random pauses and ranks without tokens, are right in every output."""
    if ranks.size != 3:
        return  # the chain needs three ranks
    assert ranks.run(chain, pairs, route) == [pairs] * 3


SIZES = {"num_max_tokens_per_rank": 4, "hidden": 16, "num_topk": 1, "num_experts": 4, "dtype": torch.float32}


def choice_of_auto(group: object) -> tuple[str, str, tuple[int, ...]]:
    with Buffer(group, **SIZES) as buffer:
        return buffer.heap, buffer.route, buffer.topology.nodes


def test_auto_takes_both(ranks: NodeRanks) -> None:
    """The defaults are the heap of several hosts, and two levels between hosts of which one has several ranks."""
    route = "flat" if ranks.node_of == [0, 1, 2] else "two_level"
    assert ranks.run(choice_of_auto) == [("ucx", route, tuple(ranks.node_of))] * ranks.size


def over_mesh(group: object, shape: tuple[int, int], route: str) -> str:
    mesh = init_device_mesh("cpu", shape)
    with Buffer(mesh, **{**SIZES, "route": route}) as buffer:
        return buffer.route


def test_nodes_of_a_mesh_have_to_be_hosts(ranks: NodeRanks) -> None:
    if ranks.node_of != [0, 0, 1, 1]:
        return
    assert ranks.run(over_mesh, (2, 2), "two_level") == ["two_level"] * 4
    assert ranks.run(over_mesh, (4, 1), "auto") == ["flat"] * 4
    for refusal in ranks.outcomes(over_mesh, (4, 1), "two_level"):
        assert isinstance(refusal, InvalidConfig)
        assert "expected nodes that are hosts, Topology([[0, 1], [2, 3]])" in str(refusal)
