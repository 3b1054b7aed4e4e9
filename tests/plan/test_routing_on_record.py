"""Statistics of routing, volumes and sizes give the numbers on record, and refusals their words.

After a change on purpose: python tests/plan/test_routing_on_record.py
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import REL, assert_on_record, every, result_of, results_of, write_record

from moe_rt.config.options import BufferOptions
from moe_rt.config.placement import Placement
from moe_rt.config.topology import Topology
from moe_rt.plan import distinct, memory, routing, volumes

RECORD = Path(__file__).with_suffix(".json")
UNEVEN = routing.popularity(13, 0.9)
# tokens, topk, ranks and shares
GROUPS = ((5, 2, 3, UNEVEN), (64, 4, 4, UNEVEN), (2, 1, 2, np.array([0.7, 0.1, 0.2])), (3, 3, 1, np.ones(3) / 3),
          (16, 2, 4, np.ones(4) / 4))  # fmt: skip
TOPOLOGIES = ((0, 0, 1, 1), (0, 0, 0, 1, 1), (0, 1, 2), (0, 0))


def visited() -> Any:
    ids = np.array([[0, 1, -1], [4, 4, 2], [-1, -1, -1]])
    chosen = distinct.limited_topk(np.random.default_rng(3), 4, 12, 3, 4, 2, 2)
    return {
        "distinct": every(distinct.distinct, (0, 1, 2, 3, 7), (1, 6, 7), (0, 1, 3, 7)),
        "limited": every(distinct.distinct_limited, (2, 3, 5), (12,), (3, 7, 13), (0, 3, 5), (0, 2, 3, 4), (1, 2)),
        "hit": every(distinct.hit, (0, 1, 3), (5,), (1, 2, 3)),
        "balanced": every(distinct.distinct_balanced, (1, 4, 8), (1, 4, 6)),
        "owners": every(distinct.owners, (5, 8), (1, 2, 3)),
        "counted": [distinct.count_distinct(ids, 5), np.sort(chosen, axis=1)],
    }


def shares() -> Any:
    rng = np.random.default_rng(5)
    ids = np.array([[0, 3], [3, -1]])
    return {
        "popularity": every(routing.popularity, (0, 1, 4, 5), (-0.1, 0.0, 1.0, np.inf), (0, 2)),
        "draw": np.sort(routing.draw(rng, 6, 3, np.array([0.4, 0.0, 0.2, 0.2, 0.2])), axis=1),
        "draw refused": every(partial(routing.draw, rng, 6), (0, 3), (np.array([0.5, 0.5, 0.0]),)),
        "unevenness": every(routing.unevenness, ([], [0, 0], [1, -1, 3], [1.0, 2.0, 0.0, 5.0, 1.0], [3])),
        "inclusion": every(routing.inclusion, (UNEVEN,), (0, 1, 4, 13, 14)),
        "wilson": every(routing.wilson, (0, 3, 10), (10, 1000), (1.96, 1.0)),
        "shares_of": every(routing.shares_of, (ids, ids[:, None], ids[1:, 1:]), (4, 5)),
    }


def moments(made: routing.Loads) -> dict[str, Any]:
    """Return moments of the ranks' rows, and their covariance, whose root depends on the processor."""
    facts = {name: getattr(made, name) for name in ("tokens", "laws", "mean", "deviation", "skewness")}
    return facts | {"covariance": made.mixing.T @ made.mixing}


def loads(number: int) -> Any:
    """Return moments of the ranks' rows, and tails next to and far from the mean."""
    made = routing.rank_loads(*GROUPS[number])
    rows = [np.maximum(made.mean + at, 0).astype(int) for at in (-1000, -20, -3, -1, 0, 1, 3, 20, 1000)]
    facts = moments(made) | {"tails": [made.tails(each) for each in rows]}
    return facts | {"quantiles": [made.quantile(p) for p in (0.05, 0.5, 0.999)]}


def rare(number: int) -> Any:
    """Return risks that are sums of tails, and the factors for small risks."""
    each = [routing.overflow(factor, *GROUPS[number]) for factor in (1.6, 2.2, 3.0, 6.0, 14.0)]
    advice = routing.capacity_advice(6.0, *GROUPS[number], risk=1e-3)
    return (
        [one for one in each if one.probability < 0.02],
        advice,
        [routing.factor_for(risk, *GROUPS[number]) for risk in (0.0199, 1e-4, 1e-9)],
    )


def drawn(number: int) -> Any:
    """Return risks from draws of correlated normals, whose directions differ from processor to processor."""
    each = [routing.overflow(factor, *GROUPS[number]) for factor in (0.3, 1.0, 1.1, 1.3)]
    return each, [routing.factor_for(risk, *GROUPS[number]) for risk in (0.02, 0.3)]


def simulated() -> Any:
    rng = np.random.default_rng(7)

    def made(*group: Any) -> Any:
        return moments(routing.rank_loads(*group))

    return {
        "overflow": [routing.simulate_overflow(f, *GROUPS[0], batches=40, seed=2) for f in (0.5, 1.2, 1.5)],
        "loads": routing.simulate_loads(rng, 5, 2, 3, UNEVEN, distinct.owners(13, 3), 4),
        "rows": every(routing.capacity_rows, (0.0, np.nan, 0.001, 1.0, 1.25, 9.0), (7,), (2,), (5, 6), (2, 5), (0, 1)),
        "refused": every(made, (0, 1), (2,), (0, 3), (UNEVEN,)),
        "risks": every(routing.factor_for, (0.0, 1.0), (5,), (2,), (2,), (UNEVEN,)),
        "experts": every(made, (5,), (2,), (14,), (UNEVEN,)),
    }


def moved(nodes: tuple[int, ...]) -> Any:
    """Return rows and bytes in the mean, and those of recorded choices, by both routes and ops."""
    topology, rng = Topology(nodes), np.random.default_rng(1)
    ids = [rng.integers(-1, 13, (rank + 2, 3)) for rank in range(len(nodes))]
    placement = Placement.contiguous(13, len(nodes))
    found: dict[str, Any] = {}
    for name, rows in (
        ("expected", volumes.expected(10, 3, 13, topology)),
        ("counted", volumes.count(ids, placement, topology)),
    ):
        found[name] = [rows.copies, rows.visits, rows.node_visits, rows.received, rows.to_ranks, rows.to_nodes]
        given = ((rows,), (3.5,), ("flat", "two_level"), ("dispatch", "combine"))
        found[f"bytes {name}"] = every(volumes.link_bytes, *given)
    return found


def refused_volumes() -> Any:
    pair, ids = Topology((0, 0)), np.array([[0, 1]])
    rows = volumes.expected(1, 1, 2, pair)
    none = volumes.expected(0, 1, 2, pair)
    places = [Placement.contiguous(2, 2), Placement.contiguous(3, 3)]
    return {
        "count": every(
            volumes.count, ([ids], [ids, ids], [ids, ids + 1], [ids - 1, ids - 2], [ids, ids[0]]), places, (pair,)
        ),
        "expected": every(volumes.expected, (-1,), (1,), (2,), (pair,)) + every(
            volumes.expected, (1,), (0, 3), (2, 1), (pair,)
        ),
        "none": [none.to_ranks, none.to_nodes],
        "bytes": every(volumes.link_bytes, (rows,), (0, -1, 0.5), ("flat", "ring"), ("dispatch", "pair")),
    }  # fmt: skip


def sizes() -> Any:
    """Return bytes of other libraries' buffers."""
    return {
        "deepep": every(memory.deepep_low_latency_bytes, (0, 1, 128), (0, 100, 128, 7168), (0, 1, 8), (0, 8, 36)),
        "hybridep": every(memory.hybridep_bytes, (0, 1, 77), (0, 64), (0, 1, 8), (0, 1, 3), (0, 5)),
    }


def buffers(heap: str) -> Any:
    """Return bytes of this library's buffers on flat and two-level routes, and refusals."""
    made = {}
    shapes = ((1, 1, 1, 4, torch.bfloat16), (77, 100, 3, 9, torch.float32), (128, 2048, 8, 32, torch.float64))
    for nodes, route, layout in product(((0, 0, 1, 1), (0, 1, 2, 3), (0, 0, 0, 0)), ("auto", "flat", "two_level"), (
        "experts", "tokens"
    )):  # fmt: skip
        for at, (tokens, hidden, topk, experts, dtype) in enumerate(shapes):
            given = dict(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, num_experts=experts, dtype=dtype)
            options = BufferOptions(route=route, capacity_factor=(None, 1.5, 2.5)[at], overflow="drop")
            found = [
                result_of(partial(memory.buffer_memory, Topology(nodes), heap, options, rank=r, layout=layout, **given))
                for r in (0, 3)
            ]
            made[f"{nodes} {route} {layout} {tokens}"] = [
                list(each.values()) if isinstance(each, dict) else each for each in found
            ]
    return made


RESULTS = {
    **{make.__name__: make for make in (visited, shares, simulated, refused_volumes, sizes)},
    **{f"{make.__name__} {at}": partial(make, at) for make in (loads, rare, drawn) for at in range(len(GROUPS))},
    **{f"moved {nodes}": partial(moved, nodes) for nodes in TOPOLOGIES},
    **{f"buffers {heap}": partial(buffers, heap) for heap in ("shm", "ucx", "loopback", "gin")},
}


@pytest.mark.parametrize("name", RESULTS)
def test_numbers_are_those_on_record(name: str) -> None:
    assert_on_record(RECORD, name, result_of(RESULTS[name]), 0.05 if name.startswith("drawn") else REL)


if __name__ == "__main__":
    write_record(RECORD, results_of(RESULTS))
