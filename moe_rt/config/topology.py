"""Which node each rank of a group is on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_rt.config.expect import expect


@dataclass(frozen=True, repr=False)
class Topology:
    """The nodes of a group and their ranks. Nodes may hold different numbers of ranks, in any order.

    Attributes:
        nodes: the node of each rank, [R]; nodes are numbered from 0, and none is empty.

    Raises:
        InvalidConfig: a node is empty, or there is no rank.
    """

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        found = set(self.nodes)
        expect(bool(found) and found == set(range(len(found))), "topology", list(self.nodes), "nodes 0, 1, ... in use")

    @classmethod
    def one_node(cls, num_ranks: int) -> Topology:
        """All ranks on one node: what a group is that says nothing about nodes."""
        return cls((0,) * num_ranks)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> Topology:
        """rows[n] are the members on node n, and `ranks` all members in the order of the group's ranks."""
        node_of = {member: node for node, row in enumerate(rows) for member in row}
        return cls(tuple(node_of[member] for member in ranks))

    @classmethod
    def of_places(cls, places: Sequence[str]) -> Topology:
        """Ranks of one place share a node; nodes are numbered as ranks come to them."""
        numbers = {place: node for node, place in enumerate(dict.fromkeys(places))}
        return cls(tuple(numbers[place] for place in places))

    def divides_as(self, other: Topology) -> bool:
        """Whether ranks share a node in one if they do in the other, however nodes are numbered."""
        return Topology.of_places(list(map(str, self.nodes))) == Topology.of_places(list(map(str, other.nodes)))

    def is_inside(self, other: Topology) -> bool:
        """Whether ranks that share a node here also do in the other."""
        return all(len({other.node_of(rank) for rank in self.ranks_of(node)}) == 1 for node in range(self.num_nodes))

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        return max(self.nodes) + 1

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return self.nodes[rank]

    def ranks_of(self, node: int) -> list[int]:
        """A node's ranks, ascending."""
        return [rank for rank, at in enumerate(self.nodes) if at == node]

    def __repr__(self) -> str:
        return f"Topology({[self.ranks_of(node) for node in range(self.num_nodes)]})"
