"""Rows and bytes of an op on each class of link, exact for given routing and in the mean for routing by a formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_rt.config.options import Route
from moe_rt.config.placement import Placement
from moe_rt.config.topology import Topology
from moe_rt.errors import expect
from moe_rt.plan.distinct import Array, distinct, hit
from moe_rt.plan.routing import Ids


@dataclass(frozen=True)
class Rows:
    """Rows of one dispatch; combine returns as many in the other direction.

    Attributes:
        copies: (token, local expert) pairs from each rank to each rank, [R, R].
        visits: distinct (token, rank) pairs, [R, R].
        node_visits: distinct (token, node) pairs from each rank to each node, [R, N].
        tokens: tokens of each rank, [R].
    """

    copies: Array
    visits: Array
    node_visits: Array
    tokens: Array
    topology: Topology

    @property
    def received(self) -> Array:
        """Rows of recv_x on each rank, [R]."""
        return np.asarray(self.copies.sum(0), float)

    @property
    def to_ranks(self) -> float:
        """Mean distinct ranks that a token visits, its own included."""
        return float(self.visits.sum() / max(self.tokens.sum(), 1))

    @property
    def to_nodes(self) -> float:
        """Mean distinct nodes that a token visits, its own included."""
        return float(self.node_visits.sum() / max(self.tokens.sum(), 1))


def count(topk_idx: Sequence[Ids], placement: Placement, topology: Topology) -> Rows:
    """Count the rows of recorded routing.

    Args:
        topk_idx: the experts of each rank's tokens, int64 [T, K] for each rank; -1 is none.

    Raises:
        InvalidConfig: the lists, the placement and the topology have different numbers of ranks, or an id is invalid.
    """
    ranks, experts = topology.num_ranks, len(placement.places)
    expect(len(topk_idx) == ranks, "topk_idx", f"{len(topk_idx)} ranks", f"{ranks}, as the topology")
    expect(max(placement.ranks) < ranks, "placement", f"rank {max(placement.ranks)}", f"below {ranks}")
    owner, node_of = np.array([*placement.ranks, -1]), np.array([*topology.nodes, -1])
    copies, visits = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    node_visits = np.zeros((ranks, topology.num_nodes))
    for rank, ids in enumerate(topk_idx):
        fits = ids.ndim == 2 and (ids.size == 0 or (int(ids.min()) >= -1 and int(ids.max()) < experts))
        expect(fits, f"topk_idx of rank {rank}", f"shape {list(ids.shape)}", f"[T, K] of ids from -1 to {experts - 1}")
        to_rank = owner[ids]
        copies[rank] = np.bincount(to_rank[to_rank >= 0], minlength=ranks)
        visits[rank] = _seen(to_rank, ranks).sum(0)
        node_visits[rank] = _seen(node_of[to_rank], topology.num_nodes).sum(0)
    return Rows(copies, visits, node_visits, np.array([len(ids) for ids in topk_idx], float), topology)


def expected(tokens: int, topk: int, experts: int, topology: Topology) -> Rows:
    """Return the mean rows of uniform routing over contiguous blocks of experts.

    Raises:
        InvalidConfig: tokens is negative, or the sizes make no sense.
    """
    expect(tokens >= 0, "tokens", tokens, "a number >= 0")
    ranks = topology.num_ranks
    distinct(ranks, experts, topk)  # checks the sizes
    held = np.bincount(np.array(Placement.contiguous(experts, ranks).ranks), minlength=ranks)
    of_node = np.bincount(np.array(topology.nodes), held).astype(int)
    to_rank = np.array([hit(int(n), experts, topk) for n in held])
    to_node = np.array([hit(int(n), experts, topk) for n in of_node])
    each = np.ones((ranks, 1)) * tokens
    return Rows(each * (held * topk / experts), each * to_rank, each * to_node, np.full(ranks, float(tokens)), topology)


def _seen(unit_of: npt.NDArray[np.int64], units: int) -> npt.NDArray[np.bool_]:
    seen = np.zeros((len(unit_of), units + 1), dtype=bool)
    np.put_along_axis(seen, unit_of, True, axis=1)  # -1 is the last column
    return seen[:, :units]


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of one op, without packet headers.

    Attributes:
        logical: as published bandwidths count them, summed over ranks: every (token, distinct rank), the own included.
        own: bytes that stay on their rank, summed over ranks.
        near_sent, near_received: bytes of each rank over links of its node, [R].
        far_sent, far_received: bytes of each node over the network, [N].
    """

    logical: float
    own: float
    near_sent: Array
    near_received: Array
    far_sent: Array
    far_received: Array


def link_bytes(rows: Rows, row_bytes: float, route: Route = "flat", op: str = "dispatch") -> LinkBytes:
    """Return the bytes that rows occupy on each class of link in dispatch or combine.

    `flat` sends a token once to each distinct rank. `two_level` sends it once to each distinct node, to the rank of the
    same index there, which passes it on within the node.

    Raises:
        InvalidConfig: the op or route is unknown, or row_bytes is not positive.
    """
    expect(op in ("dispatch", "combine"), "op", op, "dispatch or combine")
    expect(route in ("flat", "two_level"), "route", route, "flat or two_level")
    expect(row_bytes > 0, "row_bytes", row_bytes, "a positive number")
    topology = rows.topology
    node_of = np.array(topology.nodes)
    same = node_of[:, None] == node_of
    other = ~np.eye(len(node_of), dtype=bool)
    near = np.where(same & other, rows.visits, 0)
    if route == "two_level":
        near = near + _passed_on(rows, node_of)
        crossing = np.stack([rows.node_visits[node_of == n].sum(0) for n in range(topology.num_nodes)])
    else:
        far = np.where(same, 0, rows.visits)
        of_source = np.stack([far[node_of == n].sum(0) for n in range(topology.num_nodes)])
        crossing = np.stack([of_source[:, node_of == n].sum(1) for n in range(topology.num_nodes)], axis=1)
    np.fill_diagonal(crossing, 0)
    near, crossing = (near, crossing) if op == "dispatch" else (near.T, crossing.T)
    return LinkBytes(
        logical=float(rows.visits.sum() * row_bytes),
        own=float(np.trace(rows.visits) * row_bytes),
        near_sent=np.asarray(near.sum(1) * row_bytes, float),
        near_received=np.asarray(near.sum(0) * row_bytes, float),
        far_sent=np.asarray(crossing.sum(1) * row_bytes, float),
        far_received=np.asarray(crossing.sum(0) * row_bytes, float),
    )


def _passed_on(rows: Rows, node_of: npt.NDArray[np.int64]) -> Array:
    """Return the rows that a remote source's forwarder passes to each rank of its node, [R, R]."""
    passed = np.zeros_like(rows.visits)
    members = [np.flatnonzero(node_of == n) for n in range(int(node_of.max()) + 1)]
    for source in range(len(node_of)):
        index = int(np.flatnonzero(members[node_of[source]] == source)[0])
        for node, ranks in enumerate(members):
            if node == node_of[source]:
                continue
            forwarder = ranks[index % len(ranks)]
            for rank in ranks[ranks != forwarder]:
                passed[forwarder, rank] += rows.visits[source, rank]
    return passed
