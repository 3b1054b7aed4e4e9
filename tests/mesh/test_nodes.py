"""A mesh of two dimensions acts as the process group of all its ranks, with nodes along the first dimension."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh import cases_nodes as cases
from support.ranks import Ranks

from moe_rt import Buffer, ThreadGroup
from moe_rt.config.topology import Topology
from moe_rt.errors import ConfigMismatch, InvalidConfig
from moe_rt.group import groups

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(
    ("shape", "named", "nodes"),
    [
        ((2, 2), True, (0, 0, 1, 1)),
        ((4, 1), False, (0, 1, 2, 3)),
        ((1, 4), True, (0, 0, 0, 0)),
        ((2, 2, 1), True, (0, 1)),  # one half of a larger mesh for each half of the ranks
    ],
    ids=str,
)
def test_equals_its_process_group(
    make_ranks: MakeRanks, shape: tuple[int, ...], named: bool, nodes: tuple[int, ...]
) -> None:
    for found, (on_mesh, on_group) in make_ranks("shm", 4).run(cases.over_nodes, shape, named):
        assert found == nodes
        # A norm adds up by expert over a group, and by tensor over a mesh.
        torch.testing.assert_close(on_mesh.pop("norm"), on_group.pop("norm"), rtol=1e-14, atol=0)
        torch.testing.assert_close(on_mesh, on_group, rtol=0, atol=0)


def test_a_part_of_a_mesh_has_one_group(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 4).run(cases.again) == [[True, True, True]] * 4


def test_ranks_that_alternate_between_nodes(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 4).run(cases.crossed) == [(0, 1, 0, 1)] * 4


def test_ranks_that_disagree_all_raise(make_ranks: MakeRanks) -> None:
    for outcome in make_ranks("shm", 2).outcomes(cases.disagree):
        with pytest.raises(ConfigMismatch, match=r"topology: got \[0, 0\] on rank 1, expected \[0, 1\] as on rank 0"):
            raise outcome


def test_other_groups_are_one_node() -> None:
    sizes = dict(num_max_tokens_per_rank=4, hidden=8, num_topk=1, num_experts=2)
    with Buffer(ThreadGroup.make(1)[0], **sizes, dtype=torch.float32) as buffer:
        assert buffer.topology == Topology.one_node(1)
        assert "topology=Topology([[0]])" in repr(buffer)


def test_uneven_nodes() -> None:
    topology = Topology.from_rows([[5, 7], [2], [3, 4, 6]], [2, 3, 4, 5, 6, 7])
    assert topology.nodes == (1, 2, 2, 0, 2, 0)
    assert Topology.from_rows([[5, 7], [2]], [7, 2, 5]).nodes == (0, 1, 0), "members in the order of a group"
    assert (topology.num_ranks, topology.num_nodes) == (6, 3)
    assert [topology.ranks_of(node) for node in range(3)] == [[3, 5], [0], [1, 2, 4]]
    assert all(rank in topology.ranks_of(topology.node_of(rank)) for rank in range(6))


@pytest.mark.parametrize("nodes", [(), (1, 1), (0, 2)], ids=str)
def test_empty_nodes_are_refused(nodes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match="topology: got"):
        Topology(nodes)


def test_meshes_of_the_same_ranks_share_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has its ranks in ascending order, whatever the mesh's order."""
    made: dict[str, Any] = {}

    def new_group(ranks: list[int], **options: Any) -> Any:
        assert options == {"use_local_synchronization": True}
        made[str(ranks)] = SimpleNamespace(group_name=str(ranks))
        return made[str(ranks)]

    monkeypatch.setattr(groups, "_names", {})
    monkeypatch.setattr(groups, "_resolve_process_group", made.__getitem__)
    monkeypatch.setattr(groups.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(groups.dist, "new_group", new_group)
    orders = [[[6, 1], [4, 3]], [[1, 3], [4, 6]]]
    meshes: list[Any] = [SimpleNamespace(ndim=2, get_coordinate=lambda: (0, 0), mesh=torch.tensor(o)) for o in orders]
    assert [groups.process_group_of(mesh) for mesh in meshes] == [made["[1, 3, 4, 6]"]] * 2
    assert len(made) == 1
