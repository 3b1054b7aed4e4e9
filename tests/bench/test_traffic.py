"""The traffic of an op, counted by hand for three small routings, and the bytes that the memcpy reference copies for
it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_rt.errors import InvalidConfig
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants import memcpy
from moe_rt.lab.bench.contestants.base import Unavailable
from moe_rt.lab.bench.expect import Expectation
from moe_rt.lab.bench.inputs import make_inputs, num_rotations, route
from moe_rt.lab.bench.traffic import Traffic, bytes_moved, count
from moe_rt.lab.check.measuring import count_pulled, fewest_bytes
from moe_rt.lab.testing.rounds import WrongOutput
from moe_rt.routes.file import Routes

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Counted:
    """A routing and each rank's resulting work.

    Attributes:
        routing: of each rank, the experts of each of its tokens.
        traffic: of each rank.
        copies: op -> rows that the reference of each rank copies.
        visits, away: of all ranks together.
    """

    ranks: int
    experts: int
    routing: list[list[list[int]]]
    traffic: list[Traffic]
    copies: dict[str, list[float]]
    visits: int
    away: int

    def case(self, **changes: Any) -> Case:
        tokens, topk = len(self.routing[0]), len(self.routing[0][0])
        return Case(**{**dict(ranks=self.ranks, experts=self.experts, tokens=tokens, topk=topk, hidden=5), **changes})


# Experts 0 and 1 are on rank 0, 2 and 3 on rank 1.
# Rank 0's tokens visit {0}, {0, 1} and {1}: 2 + 1 + 0 rows for rank 0 and 0 + 1 + 2 for rank 1; 4 visits, 2 of them
# away.
# Rank 1's tokens visit {1, 0}, {1} and {1}: 1 row for rank 0 and 1 + 2 + 2 for rank 1; 4 visits, 1 of them away.
# So rank 0 gets 3 + 1 rows, of 1 guest, and rank 1 gets 3 + 5, of 2 guests.
TWO_RANKS = Counted(
    ranks=2,
    experts=4,
    routing=[[[0, 1], [1, 2], [2, 3]], [[2, 0], [3, 2], [3, 2]]],
    traffic=[
        Traffic(tokens=3, copies=4, visits=4, guests=1, away=2),
        Traffic(tokens=3, copies=8, visits=4, guests=2, away=1),
    ],
    copies={
        "dispatch": [4, 8],
        # read N, write partial sums of guests, read those of tokens that were away, write T; half of that
        "combine": [(4 + 1 + 2 + 3) / 2, (8 + 2 + 1 + 3) / 2],
        # read T, write N, and the same again
        "pair": [(3 + 4 + 10) / 2, (3 + 8 + 14) / 2],
    },
    visits=8,
    away=3,
)
# Experts 0 to 2 are on rank 0, 3 and 4 on rank 1, 5 and 6 on rank 2.
# Visits of rank 0's tokens: {0} with three rows, {0, 1, 2} with one each. Of rank 1's: {1, 0} with two and one, {2, 1}
# with two and one. Of rank 2's: {0, 2} with two and one, {0} with three. By source and destination, these are
#   rows    4 1 1    visits  2 1 1
#           1 3 2            1 2 1
#           5 0 1            2 0 1
# Columns add up to 10, 4, 4 rows; off the diagonal, to 3, 1, 2 guests; lines, off the diagonal, to 2, 2, 2 away.
THREE_RANKS = Counted(
    ranks=3,
    experts=7,
    routing=[[[0, 1, 2], [2, 3, 5]], [[3, 4, 0], [5, 6, 3]], [[0, 1, 6], [1, 2, 0]]],
    traffic=[
        Traffic(tokens=2, copies=10, visits=4, guests=3, away=2),
        Traffic(tokens=2, copies=4, visits=4, guests=1, away=2),
        Traffic(tokens=2, copies=4, visits=3, guests=2, away=2),
    ],
    copies={
        "dispatch": [10, 4, 4],
        "combine": [(10 + 3 + 2 + 2) / 2, (4 + 1 + 2 + 2) / 2, (4 + 2 + 2 + 2) / 2],
        "pair": [(2 + 10 + 17) / 2, (2 + 4 + 9) / 2, (2 + 4 + 10) / 2],
    },
    visits=11,
    away=6,
)
# All tokens stay on the only rank.
ONE_RANK = Counted(
    ranks=1,
    experts=3,
    routing=[[[0], [2], [2], [1]]],
    traffic=[Traffic(tokens=4, copies=4, visits=4, guests=0, away=0)],
    copies={"dispatch": [4], "combine": [(4 + 4) / 2], "pair": [(4 + 4 + 4 + 4) / 2]},
    visits=4,
    away=0,
)
ALL = pytest.mark.parametrize("counted", [TWO_RANKS, THREE_RANKS, ONE_RANK], ids=lambda counted: f"R={counted.ranks}")
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@ALL
def test_traffic_of_every_rank(counted: Counted) -> None:
    traffic = count(counted.case(), [torch.tensor(rank) for rank in counted.routing])
    assert traffic == counted.traffic
    for op, rows in counted.copies.items():
        assert [one.copied_rows(op) for one in traffic] == rows


@ALL
def test_expected_traffic_is_that_of_the_routing_of_all_ranks(counted: Counted, tmp_path: Path) -> None:
    np.save(tmp_path / "trace.npy", np.concatenate([np.array(rank) for rank in counted.routing]))
    case = counted.case(routing=f"trace:{tmp_path / 'trace.npy'}")
    assert all(Expectation(case, 0, rank, 2).traffic() == counted.traffic for rank in range(case.ranks))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize(("op", "trips"), [("dispatch", 1), ("combine", 1), ("pair", 2), ("layer", 2)])
@ALL
def test_bytes_of_an_op(counted: Counted, op: Any, trips: int, dtype: str) -> None:
    """Bytes are averaged over ranks; a row has five elements."""
    case = counted.case(op=op, dtype=dtype)
    assert case.row_bytes == 5 * ITEM_BYTES[dtype]
    assert bytes_moved(case, counted.traffic) == {
        "logical": trips * case.tokens * case.topk * 5 * ITEM_BYTES[dtype],
        "physical": trips * counted.visits * 5 * ITEM_BYTES[dtype] // counted.ranks,
        "wire": trips * counted.away * 5 * ITEM_BYTES[dtype] // counted.ranks,
    }


def test_bytes_in_numbers() -> None:
    """A pair of three ranks' routing in fp32 has rows of 20 bytes; 2 * 6, 2 * 11 / 3 and 2 * 6 / 3 of them."""
    assert bytes_moved(THREE_RANKS.case(op="pair", dtype="fp32"), THREE_RANKS.traffic) == {
        "logical": 240,
        "physical": 146,
        "wire": 80,
    }


def test_most_that_a_rank_can_get() -> None:
    """A rank receives at most all 3 * 2 tokens, for 3 experts of rank 0, or fewer if tokens choose fewer; rows of 10
    bytes."""
    assert THREE_RANKS.case().local_experts == [3, 2, 2]
    assert THREE_RANKS.case().most_received_bytes == 3 * 2 * 3 * 10
    assert THREE_RANKS.case(topk=2).most_received_bytes == 3 * 2 * 2 * 10
    assert THREE_RANKS.case(topk=7, dtype="fp64").most_received_bytes == 3 * 2 * 3 * 40


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("op", ["dispatch", "combine", "pair"])
@ALL
def test_the_reference_copies_these_bytes(
    counted: Counted, op: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference copies exactly these bytes; its check reports any that are missing."""
    case = counted.case(op=op, dtype=dtype)
    blocks: list[torch.Tensor] = []
    present = memcpy._present
    monkeypatch.setattr(memcpy, "_present", lambda *size: blocks.append(present(*size)) or blocks[-1])
    expect: Any = SimpleNamespace(traffic=lambda: counted.traffic)
    for rank, rows in enumerate(counted.copies[op]):
        blocks.clear()
        world: Any = SimpleNamespace(rank=rank, processor=SimpleNamespace(device=CPU))
        inputs = [make_inputs(case, 0, rank, i) for i in range(2)]
        (step,) = memcpy.Memcpy(case, world).steps(inputs, expect)
        assert [len(block) for block in blocks] == [rows * 5 * ITEM_BYTES[dtype]] * (1 if op == "dispatch" else 2)
        for i in range(3):
            step.check(i, step.run(i))
        if op == "dispatch":  # all tokens in turn, so that caches find no row more often than necessary
            copied = blocks[0].view(case.torch_dtype).view(-1, 5)
            assert torch.equal(copied, inputs[0].x.repeat(5, 1)[: len(copied)])
        blocks[0][-1] ^= 1
        with pytest.raises(WrongOutput, match=f"rank {rank}: the cop"):
            step.check(2, None)


def test_the_reference_copies_the_rows_of_this_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference copies this input's rows; the previous input's rows are reported."""
    world: Any = SimpleNamespace(rank=1, processor=SimpleNamespace(device=CPU))
    expect: Any = SimpleNamespace(traffic=lambda: TWO_RANKS.traffic)
    case = TWO_RANKS.case(op="dispatch")
    (step,) = memcpy.Memcpy(case, world).steps([make_inputs(case, 0, 1, i) for i in range(2)], expect)
    step.run(0)
    with pytest.raises(WrongOutput, match="differ from their sources"):
        step.check(1, None)


def test_the_reference_where_routing_leaves_a_rank_out_and_for_a_layer() -> None:
    """A rank that receives nothing copies nothing; a layer has no copy."""
    case = Case(op="dispatch", routing="onehot", tokens=2, topk=2, hidden=4)
    expect = Expectation(case, 0, 1, 2)
    assert expect.traffic()[1] == Traffic(tokens=2, copies=0, visits=2, guests=0, away=2)
    world: Any = SimpleNamespace(rank=1, processor=SimpleNamespace(device=CPU))
    (step,) = memcpy.Memcpy(case, world).steps([make_inputs(case, 0, 1, 0)], expect)
    step.check(0, step.run(0))
    with pytest.raises(Unavailable):
        memcpy.Memcpy(Case(op="layer"), world)


def test_inputs_of_all_ranks_are_twice_the_cache() -> None:
    """Inputs of all ranks fill the cache twice: at least two, so that neighbours differ, and at most eight. Here an
    input of both ranks has 2 * 3 * 10 bytes."""
    case = TWO_RANKS.case()
    turns = {0: 2, 30: 2, 60: 2, 61: 3, 90: 3, 91: 4, 210: 7, 240: 8, 241: 8, 1 << 25: 8}
    assert {cache: num_rotations(case, cache) for cache in turns} == turns


def test_fewest_bytes_of_launches() -> None:
    """Launches of the two ranks' routing move at least 6 tokens, 8 (token, rank) pairs, 12 rows of 10 bytes, each read
    and written."""
    pulled = sum(count_pulled(torch.tensor(rank), num_experts=4, num_ranks=2) for rank in TWO_RANKS.routing)
    assert pulled == 8
    assert fewest_bytes(6, pulled, 12, 10) == {
        "dispatch_send": (6 + 6) * 10,
        "dispatch_receive": (8 + 12) * 10,
        "combine_send": (12 + 8) * 10,
        "combine_receive": (8 + 6) * 10,
    }


def test_what_is_popular_is_so_on_all_ranks() -> None:
    case = Case(ranks=4, tokens=200, experts=16, topk=2, routing="lognormal:2")
    counts = [route(case, 0, rank, rank).flatten().bincount(minlength=16) for rank in range(4)]
    first, *others = counts
    assert int(first.max()) > 2 * case.tokens * case.topk // case.experts > 10 * int(first.min())
    assert all(int((count - first).abs().sum()) < case.tokens * case.topk // 3 for count in others)


def test_a_trace_is_read_on_where_the_rank_before_stopped(tmp_path: Path) -> None:
    rows = np.array([[row, row + 1] for row in range(7)])
    np.save(tmp_path / "trace.npy", rows)
    case = Case(ranks=2, tokens=3, experts=8, topk=2, routing=f"trace:{tmp_path / 'trace.npy'}")
    read = [route(case, 0, rank, rotation)[:, 0].tolist() for rotation in range(2) for rank in range(2)]
    assert read == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]]


def test_recorded_routes_are_read_layer_after_layer(tmp_path: Path) -> None:
    ids = torch.arange(8).reshape(2, 2, 2)  # [tokens, layers, K]
    Routes.from_routed_experts([ids], num_experts=8).save(tmp_path / "a.npz")
    case = Case(ranks=2, tokens=2, experts=8, topk=2, routing=str(tmp_path / "a.npz"))
    assert [route(case, 0, rank, 0).tolist() for rank in range(2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    with pytest.raises(InvalidConfig, match=r"routing: got K = 2 in .*a.npz, expected K = 4"):
        route(Case(ranks=2, tokens=2, experts=8, topk=4, routing=case.routing), 0, 0, 0)
