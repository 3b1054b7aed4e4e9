"""Traffic between nodes, counted by hand for two small routings, and the least time of a link."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_rt.config.topology import Topology
from moe_rt.errors import InvalidConfig
from moe_rt.lab.bench.cases import CASES, Case
from moe_rt.lab.bench.cli import _places
from moe_rt.lab.bench.contestants import NAMES, ON_NODES, ON_ONE_HOST
from moe_rt.lab.bench.crossing import bytes_through, count_rows, least_us, list_bytes
from moe_rt.lab.bench.table import cells, columns
from moe_rt.lab.cluster.cluster import Traffic

SIZES: dict[str, Any] = dict(heap="ucx", tokens=2, topk=3, hidden=5)  # rows of ten bytes in bf16
# Two experts on each of four ranks, 4 to 7 on node 1. Remote experts, ranks and nodes of each token:
#   rank 0: {4, 5} 2 1 1, {4, 6, 7} 3 2 1    rank 1: none, {5, 6} 2 2 1    node 0 to 1: 7 5 3
#   rank 2: {0, 2, 3} 3 2 1, none            rank 3: none, {2} 1 1 1       node 1 to 0: 4 3 2
TWO_NODES = Case(ranks=4, nodes=2, experts=8, rate="1mbit", **SIZES)
OF_TWO = [torch.tensor(t) for t in ([[0, 4, 5], [4, 6, 7]], [[0, 1, 2], [3, 5, 6]], [[0, 2, 3], [4, 5, 6]])]
OF_TWO.append(torch.tensor([[5, 6, 4], [6, 7, 2]]))
# Experts 0 to 2, 3 and 4, 5 and 6, each group on a node of one rank: nodes and ranks coincide.
THREE_NODES = Case(ranks=3, nodes=3, experts=7, **SIZES)
OF_THREE = [torch.tensor(t) for t in ([[0, 1, 2], [2, 3, 5]], [[3, 4, 0], [5, 6, 3]], [[0, 1, 6], [1, 2, 0]])]


def test_rows_between_two_nodes() -> None:
    rows = count_rows(TWO_NODES, OF_TWO)
    assert {unit: counted.tolist() for unit, counted in rows.items()} == {
        "expert": [[0, 7], [4, 0]],
        "rank": [[0, 5], [3, 0]],
        "node": [[0, 3], [2, 0]],
    }


def test_rows_between_three_nodes() -> None:
    rows = count_rows(THREE_NODES, OF_THREE)
    assert rows["expert"].tolist() == [[0, 1, 1], [1, 0, 2], [5, 0, 0]]
    assert rows["rank"].tolist() == rows["node"].tolist() == [[0, 1, 1], [1, 0, 1], [2, 0, 0]]


def test_on_one_host_nothing_crosses() -> None:
    rows = count_rows(Case(ranks=4, experts=8, tokens=2, topk=3), OF_TWO)
    assert all(counted.tolist() == [[0]] for counted in rows.values())


def test_lists() -> None:
    """Lists consist of counts of four remote experts for each of two ranks, 4 * 8 + 8 * 5 bytes for each remote source
    and reader, or node, 16 bytes a row, and 16 and a weight for each (token, expert)."""
    rows = count_rows(TWO_NODES, OF_TWO)
    assert list_bytes(TWO_NODES, rows, "expert").tolist() == [[0, 2 * 4 * 8], [2 * 4 * 8, 0]]
    entries = [16 * 5 + 20 * 7, 16 * 3 + 20 * 4]
    assert list_bytes(TWO_NODES, rows, "rank").tolist() == [[0, 4 * 72 + entries[0]], [4 * 72 + entries[1], 0]]
    assert list_bytes(TWO_NODES, rows, "node").tolist() == [[0, 2 * 72 + entries[0]], [2 * 72 + entries[1], 0]]
    wide = TWO_NODES.changed(dtype="fp64")
    assert list_bytes(wide, rows, "rank").tolist() == [
        [0, 4 * 72 + 16 * 5 + 24 * 7],
        [4 * 72 + 16 * 3 + 24 * 4, 0],
    ]
    assert list_bytes(THREE_NODES, count_rows(THREE_NODES, OF_THREE), "expert").tolist() == [
        [0, 16, 16],
        [24, 0, 16],
        [24, 16, 0],
    ]


@pytest.mark.parametrize(
    ("op", "times", "node_0"),
    [
        ("dispatch", 1, Traffic(sent=50 + 508, received=30 + 416)),
        ("combine", 1, Traffic(sent=30, received=50)),
        ("pair", 1, Traffic(sent=50 + 508 + 30, received=30 + 416 + 50)),
        ("layer", 2, Traffic(sent=2 * (50 + 30) + 508, received=2 * (30 + 50) + 416)),
    ],
)
def test_bytes_of_an_op(op: Any, times: int, node_0: Traffic) -> None:
    """Bytes count once for each rank; node 1 receives what node 0 sends."""
    case = TWO_NODES.changed(op=op)
    both = bytes_through(case, count_rows(case, OF_TWO), "rank", times)
    assert both == [node_0, Traffic(sent=node_0.received, received=node_0.sent)]


def test_bytes_of_a_pair_once_for_each_node() -> None:
    rows = count_rows(TWO_NODES, OF_TWO)
    assert bytes_through(TWO_NODES, rows, "node")[0] == Traffic(sent=30 + 364 + 20, received=20 + 272 + 30)


@pytest.mark.parametrize(("op", "trips"), [("dispatch", 1), ("combine", 1), ("pair", 2), ("layer", 2)])
def test_the_least_time(op: Any, trips: int) -> None:
    """The least time is that of the node that sends or receives most: three rows, 240 bits at a bit a microsecond, each
    way."""
    case = TWO_NODES.changed(op=op)
    rows = count_rows(case, OF_TWO)
    assert least_us(case, rows) == trips * 240
    assert least_us(case.changed(rate="200kbit"), rows, times=2) == 2 * trips * 1200
    assert least_us(case.changed(rate=""), rows) is None


def test_the_least_time_is_of_whoever_receives_most() -> None:
    """Node 0 receives three rows, while no node sends more than two."""
    case = THREE_NODES.changed(op="dispatch", rate="1mbit")
    assert least_us(case, count_rows(case, OF_THREE)) == 240


def test_where_ranks_are() -> None:
    assert TWO_NODES.topology == Topology((0, 0, 1, 1))
    assert CASES["pair-4x512x2048"].topology == Topology.one_node(4)
    assert "R=4 T=2 H=5 K=3 E=8 on 2 nodes, 1mbit, bf16" in TWO_NODES.title()
    assert "on each of 4 ranks on 2 nodes, 5 bf16 elements" in TWO_NODES.in_words()
    assert "on 3 nodes, no limit" in THREE_NODES.title()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "ranks: got 3, expected a multiple of 2 nodes"),
        ({"heap": "shm"}, "heap: got 'shm' for ranks on several nodes, expected 'ucx'"),
        ({"rate": "fast"}, "rate: got 'fast', expected a number with kbit"),
    ],
)
def test_odd_places_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        TWO_NODES.changed(**changes)


def test_options_that_say_where() -> None:
    """The default is two ranks on a node; each number of nodes is combined with each rate."""
    assert _places(None, None, {}) == [{}]
    assert _places((2,), None, {"ranks": 8}) == [{"heap": "ucx", "nodes": 2, "rate": ""}]
    assert [(p["nodes"], p["ranks"], p["rate"]) for p in _places((2, 4), "1gbit,unlimited", {})] == [
        (2, 4, "1gbit"),
        (2, 4, ""),
        (4, 8, "1gbit"),
        (4, 8, ""),
    ]
    on_demand = {"moe_rt_invariant", "moe_rt_chunks"}
    assert {*ON_ONE_HOST, *ON_NODES, *on_demand} == set(NAMES)


def test_what_tables_show_of_links() -> None:
    times = {"p50": 2e3, "p90": 2e3, "p99": 2e3}
    result = {
        "contestant": "moe_rt", "phase": "", "isolated_us": times, "free_running_us": times, "logical_gbps": 0.0,
        "physical_gbps": 0.0, "link": {"sent": [3e6, 1e6], "received": [1e6, 3e6], "formula": [2e6, 1e6]},
    }  # fmt: skip
    run = {"ratios": {}, "least_us": 1e3}
    assert dict(zip(columns(run), cells(run, result)[1:], strict=True)) | {} == {
        "isolated p50": "2 ms", "p90": "2 ms", "p99": "2 ms", "free-running p50": "2 ms", "GB/s logical": "0.00",
        "GB/s physical": "0.00", "time / moe_rt": "", "MB sent": "2", "by formula": "1.5", "time / least": "2.00",
    }  # fmt: skip
    result["link"]["formula"] = None
    assert cells({"ratios": {}, "least_us": None}, result)[-3:] == ["2", "", ""]
