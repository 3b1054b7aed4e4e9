"""The compiled engine gives Python the recorded sizes and tables, and kernels the bytes that they read.

Results of a grid of inputs are recorded in engine_interface.json, because ranks of other builds, recorded plans and
kernels rely on them. Run this file as a program to record them again.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import assert_on_record, write_record

from moe_rt import _engine

RECORD = Path(__file__).with_name("engine_interface.json")
USUAL: dict[str, Any] = dict(
    num_ranks=4, num_experts=12, num_max_tokens=33, hidden=72, num_topk=3, elem_bytes=2, by_token=False,
    alignment=1, num_pushed_tokens=0, num_pushed_rows=0, sums=0, depth=1, node_of=[],
)  # fmt: skip
SHAPES: list[dict[str, Any]] = [
    {},
    {"elem_bytes": 8, "hidden": 24, "sums": 1},
    {"elem_bytes": 4, "by_token": True, "depth": 3},
    {"alignment": 32, "num_topk": 7, "num_pushed_tokens": 33, "num_pushed_rows": 9},
    {"num_max_tokens": 2, "num_pushed_tokens": 2, "num_pushed_rows": 2},
    {"num_max_tokens": 2, "num_pushed_tokens": 2, "num_pushed_rows": 2, "num_experts": 3000},
    {"num_max_tokens": 2, "num_pushed_tokens": 2, "num_pushed_rows": 2, "num_topk": 12, "elem_bytes": 8},
    {"num_max_tokens": 3, "num_pushed_tokens": 3, "num_pushed_rows": 2},
    {"num_ranks": 5, "node_of": [0, 0, 1, 1, 1], "depth": 2},
    {"num_ranks": 6, "node_of": [0, 1, 2, 0, 1, 0], "num_topk": 5, "sums": 1, "num_experts": 40},
    {"num_ranks": 6, "node_of": [2, 1, 0, 2, 1, 2], "by_token": True, "elem_bytes": 8},
    {"num_ranks": 8, "num_experts": 256, "num_topk": 8, "num_max_tokens": 64, "num_pushed_tokens": 64},
    {"num_ranks": 1, "num_experts": 600, "num_topk": 40, "num_max_tokens": 1},
]


def shape_of(changes: dict[str, Any]) -> _engine.Shape:
    return _engine.Shape(**USUAL | {name: value for name, value in changes.items() if name in USUAL})


def sizes_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Return all sizes and offsets that Python asks of a shape."""
    given, shape = {**USUAL, **changes}, shape_of(changes)
    ranks, depth = given["num_ranks"], given["depth"]
    spread = [expert % ranks for expert in range(given["num_experts"])]
    return {
        "row": shape.row_bytes(),
        "segment": shape.segment_bytes(),
        "tokens": [shape.tokens_at(window) for window in range(2 * depth)],
        "staged": [shape.staged_at(client) for client in range(3)],
        "recv_plan": [[shape.recv_plan_ints(local), shape.recv_ids_at(local)] for local in (1, 2, 5)],
        "scratch": [
            _engine.scratch_bytes(shape, place, ranks - 1, threads)
            for place, threads in product((spread, [ranks - 1] * len(spread)), (1, 32, 33, 96, 512, 1024))
        ],
        "whole": _engine.whole_tokens(shape),
        "network": [
            [n.staging, n.warp_bytes, n.mirrors, n.mirror_bytes, n.bytes]
            for n in (_engine.NetworkLayout(shape, warps) for warps in (1, 33))
        ],
        "closed": _engine.closed_marks(shape, ranks // 2),
    }


def tables_of(expert_rank: list[int], ranks: int) -> list[list[int]]:
    tables = _engine.PlacementTables(expert_rank, ranks)
    return [tables.position, tables.owner, tables.rank_first, tables.entries]


def nodes_of(node_of: list[int]) -> list[list[list[int]]]:
    tables = [_engine.NodeTables(node_of, rank) for rank in range(len(node_of))]
    return [[t.clients, t.proxies, t.client_index, t.proxy_on] for t in tables]


def rings_of() -> list[list[int]]:
    grid = product((0, 1, 128, 5000, 49152), (49152, 227 * 1024), (1, 4, 16), (1, 8, 33))
    rings = (
        _engine.RingMemory(scratch_bytes=scratch, block_bytes=block, warps=warps, num_topk=topk)
        for scratch, block, warps, topk in grid
    )
    return [
        [ring.at, ring.bytes, ring.piece, *struct.unpack("4i", ctypes.string_at(ring.address, 16))] for ring in rings
    ]


def constants() -> dict[str, Any]:
    names = (name for name in dir(_engine) if name.isupper())
    return {name: getattr(_engine, name) for name in names} | {"elements": [list(e) for e in _engine.elements()]}


@functools.cache
def results() -> dict[str, Any]:
    """Return everything that is recorded."""
    placements = [([0], 1), ([1, 0, 1, 3, 1], 4), ([2, 2, 0, 0, 2, 0], 3), ([4 - e % 5 for e in range(13)], 5)]
    nodes = [[0], [0, 0], [0, 1], [1, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 0], [2, 0, 0, 1, 0, 2, 2]]
    return {
        "constants": constants(),
        "plan": {name: value for name, value in vars(_engine.RecvPlan).items() if name.startswith("num_")},
        "sizes": [sizes_of(changes) for changes in SHAPES],
        "tables": [tables_of(*placement) for placement in placements],
        "nodes": [nodes_of(node_of) for node_of in nodes],
        "rings": rings_of(),
        "state": list(struct.unpack("6q", _engine.device_state())),
    }


@pytest.mark.parametrize("name", ["constants", "plan", "sizes", "tables", "nodes", "rings", "state"])
def test_results_are_those_on_record(name: str) -> None:
    assert_on_record(RECORD, name, results()[name])


def test_windows_take_turns_if_a_kind_follows_itself() -> None:
    """Ops 1 and 4 are of one kind, ops 2 and 3 of the other."""
    selector = _engine.WindowSelector()
    taken = []
    for op in (1, 4, 1, 2, 3, 4, 2, 1, 1):
        expected = selector.next(op)
        assert selector.next(op) == expected
        taken.append(selector.take(op))
        assert taken[-1] == expected
    assert taken == [0, 1, 0, 0, 1, 0, 1, 0, 1]


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def test_links_hold_what_kernels_read() -> None:
    links = _engine.Links(segment=1, outbox=2, staging=3, warp_bytes=4, segments=5)
    assert words(links.address, 6) == [1, 2, 3, 4, 5, 1]
    links.over_gin(communicator=6, segment_window=7, memory_window=8, segment_bytes=9)
    assert words(links.address, 10) == [1, 2, 3, 4, 6, 7, 8, 1, 2, 9]
    assert words(_engine.Links().address, 6) == [0] * 6


def test_a_world_holds_what_kernels_read() -> None:
    """A world is a shape, the layout of a channel, and the fields that follow them."""
    shape = shape_of({"depth": 2})
    nodes = _engine.Nodes(own=1, num_clients=2, node_of=13, proxy_of=14, client_index=15, clients=16, proxy_on=17)
    given: dict[str, Any] = dict(
        shape=shape, rank=3, config_hash=7, position=21, owner=22, rank_first=23, entries=24, base=25, mirror=26,
        nodes=nodes, plan_mark=27,
    )  # fmt: skip
    first, second = (_engine.World(channel=channel, **given) for channel in range(2))
    for world in (first, second):
        assert words(world.address + 416, 6) == [21, 22, 23, 24, 25, 26]
        assert ctypes.c_int32.from_address(world.address + 464).value == 3, "the rank"
        assert words(world.address + 472, 8) == [7, 27, 1 | 2 << 32, 13, 14, 15, 16, 17]
        sizes = (ctypes.c_int32 * 16).from_address(world.address)
        assert list(sizes) == [4, 12, 33, 72, 3, 2, 4, 0, 1, 0, 0, 1, 0, 0, 0, 2]
    layouts = [words(world.address + 64, 44) for world in (first, second)]
    assert [shape.tokens_at(2 * channel) in layout for channel, layout in enumerate(layouts)] == [True, True]
    assert shape.tokens_at(2) not in layouts[0]
    flat = _engine.World(channel=0, **given | {"nodes": _engine.Nodes()})
    assert words(flat.address + 488, 6) == [0] * 6


def test_marks_of_plans_differ() -> None:
    marks = {_engine.new_plan_mark() for _ in range(100)}
    assert len(marks) == 100
    assert len({mark >> 32 for mark in marks}) > 90
    assert len({mark & 0xFFFFFFFF for mark in marks}) > 90


def test_a_failure_is_read_once_it_is_reported() -> None:
    record = ctypes.create_string_buffer(_engine.HOST_RECORD_BYTES)
    address = ctypes.addressof(record)
    assert _engine.reported(address) is None
    struct.pack_into("<4iQ2q", record, 8, 20, 2, 3, 5, 6, 7, 8)
    assert _engine.reported(address) is None
    struct.pack_into("<I", record, 0, 1)
    status = _engine.reported(address)
    assert status is not None
    read = (status.code, status.op, status.phase, status.peer, status.seq, status.got, status.expected)
    assert read == (20, 2, 3, 5, 6, 7, 8)


def test_arguments_that_are_set_later() -> None:
    combine = _engine.CombineArgs(
        op=2, y=1, recv_weights=2, grad_recv_weights=3, num_rows=4, capacity=5, recv_plan=6, send_plan=7, num_tokens=8,
        out=9, grad_topk_weights=10,
    )  # fmt: skip
    assert (combine.topk_weights, combine.num_tokens) == (0, 8)
    combine.topk_weights = 77
    assert combine.topk_weights == 77
    assert words(combine.address, 12)[-1] == 77
    control = _engine.Control(state=1, record=2, timeout_ns=3, tag=4, may_overflow=1)
    control.tag = 9
    assert control.tag == 9
    assert words(control.address, 4) == [1, 2, 3, 9 | 1 << 32]


class Driver:
    """Records launches, and refuses the one of a given number."""

    def __init__(self, refuses: int = -1) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = refuses
        pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
        plain = ctypes.CFUNCTYPE(ctypes.c_int, pointer, *[unsigned] * 7, pointer, pointer, pointer)
        early = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)
        self._kept = plain(self._launch), early(self._launch_ex)
        self.launch_kernel, self.launch_kernel_ex = (ctypes.cast(f, pointer).value or 0 for f in self._kept)

    def _launch(self, *given: Any) -> int:
        return self._note("plain", *given)

    def _launch_ex(self, config: int, function: int, params: int, extra: int | None) -> int:
        fields = struct.unpack("<7I4x2QI4x", ctypes.string_at(config, 56))
        attribute = struct.unpack("<2Ii", ctypes.string_at(fields[8], 12))
        return self._note("early", function, *fields[:8], fields[9], attribute, params, extra)

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        return 700 if len(self.calls) == self.refuses else 0


def launched(driver: Driver, early: bool) -> tuple[int, int]:
    grids = [(11, 2, 3), (12, 4, 5), (13, 6, 7)]
    return _engine.launch(driver.launch_kernel, driver.launch_kernel_ex if early else 0, grids, 256, 31, 32)


def test_kernels_are_queued_in_order() -> None:
    driver = Driver()
    assert launched(driver, early=False) == (3, 0)
    sizes = [(11, 2, 3), (12, 4, 5), (13, 6, 7)]
    assert driver.calls == [("plain", f, blocks, 1, 1, 256, 1, 1, shared, 31, 32, None) for f, blocks, shared in sizes]


def test_all_but_the_first_may_begin_early() -> None:
    driver = Driver()
    assert launched(driver, early=True) == (3, 0)
    assert driver.calls[0] == ("plain", 11, 2, 1, 1, 256, 1, 1, 3, 31, 32, None)
    overlaps = (6, 0, 1)  # programmatic stream serialization, allowed
    assert driver.calls[1:] == [
        ("early", f, blocks, 1, 1, 256, 1, 1, shared, 31, 1, overlaps, 32, None)
        for f, blocks, shared in [(12, 4, 5), (13, 6, 7)]
    ]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("refuses", [1, 2, 3])
def test_nothing_is_queued_after_a_refusal(refuses: int, early: bool) -> None:
    driver = Driver(refuses)
    assert launched(driver, early) == (refuses - 1, 700)
    assert len(driver.calls) == refuses


if __name__ == "__main__":
    write_record(RECORD, results())
