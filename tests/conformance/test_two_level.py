"""route="two_level" with mapped memory: the bits of the oracle that adds node by node, for any assignment of nodes.

tests/conformance/test_over_nodes.py has the same over a network, and tests/protocol/test_remote_peers.py over one that
does everything late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conformance import cases_scaled_rows
from support.ranks import Ranks, ThreadRanks
from support.rounds import full_round, one_round, rounds_in_a_row
from support.routing import buffer_kwargs, make_inputs, make_spec
from test_conformance import tokens_for
from torch.distributed.device_mesh import init_device_mesh

from moe_rt import Buffer, ThreadGroup
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.errors import CapacityOverflow, InvalidConfig, InvalidRouting, TooManyTokens

MakeRanks = Callable[[str, int], Ranks]
FP8 = torch.float8_e4m3fn
NODES = {
    "2x2": (0, 0, 1, 1),
    "1+1+1": (0, 1, 2),
    "1+2": (0, 1, 1),
    "in turns": (1, 0, 1, 0, 0),
    "4+2+1": (0, 0, 0, 0, 1, 1, 2),
    "1+1": (0, 1),
}


def spec_of(nodes: Sequence[int], **changes: Any) -> BufferSpec:
    return make_spec(len(nodes), route="two_level", **changes)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
class TestNodes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_matches_reference(self, nodes: Sequence[int], dtype: torch.dtype) -> None:
        tokens = tokens_for(len(nodes))
        ThreadRanks(len(nodes), nodes=nodes).run(full_round, spec_of(nodes, dtype=dtype), tokens, 1, "random")

    @pytest.mark.parametrize("kind", ["topk", "one_expert"])
    def test_other_routings(self, nodes: Sequence[int], kind: str) -> None:
        tokens = tokens_for(len(nodes))
        ThreadRanks(len(nodes), nodes=nodes).run(full_round, spec_of(nodes, num_topk=9), tokens, 2, kind)

    def test_a_node_without_tokens_and_none_at_all(self, nodes: Sequence[int]) -> None:
        ranks, idle = ThreadRanks(len(nodes), nodes=nodes), [0 if node == 0 else 9 for node in nodes]
        ranks.run(rounds_in_a_row, spec_of(nodes), idle, [1, 2], "random")
        ranks.run(full_round, spec_of(nodes), [0] * len(nodes), 3, "random")

    def test_drops_on_a_used_buffer(self, nodes: Sequence[int]) -> None:
        placement = [(8 - e) % len(nodes) for e in range(9)]
        spec = spec_of(nodes, placement=placement, capacity_factor=0.4, overflow="drop")
        ThreadRanks(len(nodes), nodes=nodes).run(rounds_in_a_row, spec, [12] * len(nodes), [6, 7, 8], "topk")

    def test_teams_change_no_bit(self, nodes: Sequence[int]) -> None:
        args = (spec_of(nodes, dtype=torch.bfloat16), tokens_for(len(nodes)), 8, "random")
        ranks = ThreadRanks(len(nodes), nodes=nodes)
        assert ranks.run(full_round, *args, 3) == ranks.run(full_round, *args, 1)

    @pytest.mark.parametrize(("there", "home"), [(FP8, FP8), (None, torch.int8)])
    def test_coded_rows(self, nodes: Sequence[int], there: Any, home: Any) -> None:
        spec = spec_of(nodes, dtype=torch.bfloat16, hidden=300, dispatch_dtype=there, combine_dtype=home)
        ThreadRanks(len(nodes), nodes=nodes).run(full_round, spec, tokens_for(len(nodes)), 3, "random")

    def test_rows_of_tokens_and_with_scales(self, nodes: Sequence[int]) -> None:
        ranks, tokens = ThreadRanks(len(nodes), nodes=nodes), tokens_for(len(nodes))
        ranks.run(rounds_in_a_row, spec_of(nodes, layout="tokens"), tokens, [1, 2], "random")
        spec = spec_of(nodes, dtype=torch.bfloat16)
        ranks.run(cases_scaled_rows.scaled_round, spec, cases_scaled_rows.PLAIN, tokens, [1, 2])

    def test_aligned_experts_and_many_list_entries(self, nodes: Sequence[int]) -> None:
        """Lists of this many tokens are fetched in two steps, as far as they concern this node."""
        spec = spec_of(nodes, num_max_tokens_per_rank=200, num_topk=6, expert_alignment=8)
        ThreadRanks(len(nodes), nodes=nodes).run(rounds_in_a_row, spec, tokens_for(len(nodes), 200), [1, 2], "random")


@pytest.mark.parametrize("home", [None, FP8])
def test_one_rank_on_each_node_gives_the_flat_bits(home: Any) -> None:
    """If each node has one rank, sums have the flat order, and none is rounded twice."""
    outputs = []
    for route in ("flat", "two_level"):
        spec = make_spec(3, route=route, dtype=torch.bfloat16, combine_dtype=home)
        outputs.append(ThreadRanks(3, nodes=(0, 1, 2)).run(full_round, spec, [12, 7, 5], 4, "random"))
    assert outputs[0] == outputs[1]


def round_over_a_mesh(group: Any, shape: tuple[int, int]) -> str:
    mesh = init_device_mesh("cpu", shape)
    with Buffer(mesh, **buffer_kwargs(make_spec(4, route="two_level"))) as buffer:
        one_round(buffer, make_inputs(buffer.spec, [12, 0, 7, 5], seed=5), seed=5)
        return f"{buffer.route} over {buffer.topology}"


def test_a_mesh_of_processes_names_the_nodes(make_ranks: MakeRanks) -> None:
    ranks = make_ranks("shm", 4)
    assert set(ranks.run(round_over_a_mesh, (2, 2))) == {"two_level over Topology([[0, 1], [2, 3]])"}
    assert set(ranks.run(round_over_a_mesh, (1, 4))) == {"flat over Topology([[0, 1, 2, 3]])"}


def refusals(group: ThreadGroup) -> list[str]:
    """Refuse an input of each kind, of one rank at a time, then run a correct round."""
    spec = spec_of(group.topology.nodes, capacity_factor=0.5)
    seen = []
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        inputs = make_inputs(buffer.spec, [3] * group.size, 1, "topk")
        x, idx, weights = inputs.xs[group.rank], inputs.topk_idx[group.rank], inputs.topk_weights[group.rank]
        for rank in range(group.size):
            try:
                if rank == group.rank:
                    buffer.dispatch(x, idx + spec.num_experts, weights)
                else:
                    buffer.dispatch(x, idx, weights)
            except InvalidRouting as error:
                seen.append(f"{type(error).__name__} of {error.peer}")
        for rank in range(group.size):
            recv_x, recv_weights, handle = buffer.dispatch(x, idx * 0 - 1, weights)
            if rank == group.rank:
                handle.recv_plan.fill_(-1)
            try:
                buffer.combine(recv_x, recv_weights, handle)
            except Exception as error:
                seen.append(f"{type(error).__name__} of {error.peer}")
        full = torch.zeros(12, spec.num_topk, dtype=torch.int64)
        with pytest.raises(CapacityOverflow) as overflow:
            buffer.dispatch(torch.zeros(12, spec.hidden), full, torch.ones(12, spec.num_topk))
        seen.append(f"overflow of {overflow.value.peer}")
        with pytest.raises(TooManyTokens):
            buffer.dispatch(torch.zeros(13, spec.hidden), torch.zeros(13, 3, dtype=torch.int64), torch.ones(13, 3))
        one_round(buffer, make_inputs(buffer.spec, [1] * group.size, 2, "random"), 2)
    return seen


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 1), (0, 1, 2)], ids=str)
def test_a_refusal_is_heard_on_every_node_in_the_same_op(nodes: Sequence[int]) -> None:
    outcomes = ThreadRanks(len(nodes), nodes=nodes).run(refusals)
    expected = [f"InvalidRouting of {rank}" for rank in range(len(nodes))]
    expected += [f"InvalidInput of {rank}" for rank in range(len(nodes))]
    assert outcomes == [[*expected, "overflow of 0"]] * len(nodes)


def test_routes_that_make_no_sense() -> None:
    group = ThreadGroup.make(1)[0]
    with pytest.raises(InvalidConfig, match="route: got up, expected one of"):
        Buffer(group, **{**buffer_kwargs(make_spec(1)), "route": "up"})
    with pytest.raises(InvalidConfig, match=r"nodes: got \(0,\), expected a node for each of 2 ranks"):
        ThreadGroup.make(2, nodes=(0,))
    with Buffer(group, **{**buffer_kwargs(make_spec(1)), "route": "two_level"}) as buffer:
        assert buffer.route == "flat", "one node has one level"


def test_nodes_are_compared_by_who_shares_one() -> None:
    assert Topology((1, 1, 0)).divides_as(Topology((0, 0, 1)))
    assert not Topology((0, 0, 1)).divides_as(Topology((0, 1, 1)))
    assert Topology.of_places(["b", "a", "b"]) == Topology((0, 1, 0))
