"""Traffic between nodes in an op: bytes that each node sends, and the least time that the links need for them.

An exchange sends a token's row once for each expert on another node, once for each rank there, or once for each node,
and returns as many rows. Once for each node is the least that any exchange must send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from moe_rt.config.placement import Placement
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.traffic import TRIPS
from moe_rt.lab.cluster.cluster import Traffic, rate_in_bits

Unit = Literal["expert", "rank", "node"]
Rows = dict[Unit, Tensor]  # int64 [from node, to node], of a dispatch; 0 within a node


def count_rows(case: Case, topk_idx: Sequence[Tensor]) -> Rows:
    """Count the rows that cross in a dispatch if each token's row is sent once per remote unit, from the routing of all
    ranks."""
    topology, num_nodes = case.topology, case.topology.num_nodes
    owner = torch.tensor(Placement.contiguous(case.experts, case.ranks).ranks)
    node_of = torch.tensor(topology.nodes)
    number_of = {"expert": torch.arange(case.experts), "rank": owner, "node": node_of[owner]}
    node_of_unit = {"expert": node_of[owner], "rank": node_of, "node": torch.arange(num_nodes)}
    rows: Rows = {}
    for unit in ("expert", "rank", "node"):
        crossing = torch.zeros(num_nodes, num_nodes, dtype=torch.int64)
        for rank, idx in enumerate(topk_idx):
            visits = torch.zeros(len(idx), len(node_of_unit[unit]), dtype=torch.int64)
            visits.scatter_(1, number_of[unit][idx], 1)  # 1 for each distinct unit
            crossing[topology.node_of(rank)].index_add_(0, node_of_unit[unit], visits.sum(0))
        rows[unit] = crossing.fill_diagonal_(0)
    return rows


def list_bytes(case: Case, rows: Rows, unit: Unit) -> Tensor:
    """[from node, to node]: bytes of metadata that receivers of a dispatch need in addition to its rows.

    expert: an int64 count for each remote expert. rank: from each source, each remote rank reads int32 values, one per
    expert of the group and two per rank plus two; 16 bytes for each row; and 16 bytes and a weight for each (token,
    expert). node: the same, with the int32 values read once for all ranks of a node.
    """
    topology = case.topology
    ranks = torch.tensor([len(topology.ranks_of(node)) for node in range(topology.num_nodes)])
    local = torch.tensor(case.local_experts)
    experts = torch.zeros_like(ranks).index_add_(0, torch.tensor(topology.nodes), local)
    if unit == "expert":
        return (8 * ranks[:, None] * experts).fill_diagonal_(0)
    readers = ranks if unit == "rank" else torch.ones_like(ranks)
    numbers = (ranks[:, None] * readers * (4 * case.experts + 8 * (case.ranks + 1))).fill_diagonal_(0)
    weight = max(4, case.torch_dtype.itemsize)
    return numbers + 16 * rows["rank"] + (16 + weight) * rows["expert"]


def bytes_through(case: Case, rows: Rows, unit: Unit, times: int = 1) -> list[Traffic]:
    """Bytes that each node sends and receives in one op, without packet headers.

    Args:
        times: how often the op's rows are sent: 2 with a backward, which reuses the forward's metadata.
    """
    there, home = times * case.row_bytes * rows[unit], times * case.row_bytes * rows[unit].T
    sent = {"dispatch": there, "combine": home}.get(case.op, there + home)
    if case.op != "combine":
        sent = sent + list_bytes(case, rows, unit)
    return [Traffic(*both) for both in zip(sent.sum(1).tolist(), sent.sum(0).tolist(), strict=True)]


def least_us(case: Case, rows: Rows, times: int = 1) -> float | None:
    """Time of the links at the case's rate for one row per token and remote node, and nothing else; None without a
    limit.

    A dispatch takes as long as the node that sends or receives most. Combine takes as long in the opposite
    direction.
    """
    if not case.rate:
        return None
    busiest = int(torch.maximum(rows["node"].sum(1), rows["node"].sum(0)).max())
    return times * TRIPS[case.op] * busiest * case.row_bytes * 8e6 / rate_in_bits(case.rate)
