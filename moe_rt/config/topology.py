"""The topology of a group: the node of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_rt.errors import expect


@dataclass(frozen=True, repr=False)
class Topology:
    """The nodes of a group and their ranks. Nodes may hold different numbers of ranks, in any order.

    Attributes:
        nodes: the node of each rank, [R]; nodes are numbered from 0, and none is empty.

    Raises:
        InvalidConfig: a node or the group is empty.
    """

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        found = set(self.nodes)
        expect(bool(found) and found == set(range(len(found))), "topology", list(self.nodes), "nodes 0, 1, ... in use")

    @classmethod
    def one_node(cls, num_ranks: int) -> Topology:
        """Place all ranks on one node, the default for a group without node information."""
        return cls((0,) * num_ranks)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> Topology:
        """Return the topology in which rows[n] are the members on node n; `ranks` lists all members in rank order."""
        node_of = {member: node for node, row in enumerate(rows) for member in row}
        return cls(tuple(node_of[member] for member in ranks))

    @classmethod
    def of_places(cls, places: Sequence[str]) -> Topology:
        """Put ranks with equal places on one node; nodes are numbered in the order of their first ranks."""
        numbers = {place: node for node, place in enumerate(dict.fromkeys(places))}
        return cls(tuple(numbers[place] for place in places))

    def divides_as(self, other: Topology) -> bool:
        """True if both topologies group ranks into the same nodes, in any numbering."""
        return Topology.of_places(list(map(str, self.nodes))) == Topology.of_places(list(map(str, other.nodes)))

    def is_inside(self, other: Topology) -> bool:
        """True if ranks that share a node here also share one in `other`."""
        return all(len({other.node_of(rank) for rank in self.ranks_of(node)}) == 1 for node in range(self.num_nodes))

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        return max(self.nodes) + 1

    @property
    def shares_nodes(self) -> bool:
        """True if there are several nodes, and one of them has several ranks."""
        return 1 < self.num_nodes < self.num_ranks

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return self.nodes[rank]

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node, ascending."""
        return [rank for rank, at in enumerate(self.nodes) if at == node]

    def __repr__(self) -> str:
        return f"Topology({[self.ranks_of(node) for node in range(self.num_nodes)]})"
