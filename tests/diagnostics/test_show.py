"""The table of a report sums up a rank's last ops."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from moe_rt.diagnostics.report import OpRecord
from moe_rt.diagnostics.show import lately
from moe_rt.engine.cpu import CpuEngine
from moe_rt.errors import Op


def op(start: int, waits: int, end: int, peer: int = 1, longest: int = 0) -> OpRecord:
    """Return an op that is announced one nanosecond after its start and then waits; times in nanoseconds."""
    return OpRecord(
        number=1, op="dispatch", seq=1, tag=0, num_tokens=4, phase="" if end else "wait", status="ok" if end else "",
        start_ns=start, announced_ns=start + 1, arrived_ns=start + 1 + waits if end else 0, end_ns=end,
        longest_peer=peer, longest_ns=longest, handle_seq=0,
    )  # fmt: skip


def test_shares_of_the_time_and_who_was_waited_for() -> None:
    ops = [op(100, 10, 120, 1, 8), op(200, 3, 210, 2, 3), op(280, 7, 300, 2, 4), op(400, 0, 0)]
    assert lately(ops) == "3 ops in 2e-07 s: 25% in them, 10% waiting, longest for rank 1"


def test_a_wait_that_failed_lasted_until_the_end_of_its_op() -> None:
    unannounced = replace(op(200, 0, 210, -1), announced_ns=0, arrived_ns=0, status="fault_injected")
    failed = replace(op(280, 0, 301, -1), arrived_ns=0, status="peer_timeout")
    assert lately([op(100, 10, 120, -1), unannounced, failed]) == "3 ops in 2.01e-07 s: 25% in them, 15% waiting"


def test_waits_for_a_peer_add_up() -> None:
    ops = [op(100, 10, 120, 1, 8), op(200, 3, 210, 2, 5), op(280, 7, 300, 2, 4)]
    assert lately(ops).endswith("longest for rank 2"), "5 and 4 ns are more than 8"
    ops = [op(100, 10, 120, 1, 8), op(200, 3, 210, 0, 5), op(280, 7, 300, 0, 4), op(320, 1, 330, -1, 99)]
    assert lately(ops).endswith("longest for rank 0")


def test_nothing_is_said_of_a_single_op_or_of_peers_that_there_are_not() -> None:
    assert lately([op(100, 10, 120), op(200, 0, 0)]) == ""
    assert lately([op(0, 1, 10, -1), op(10, 1, 20, -1)]) == "2 ops in 2e-08 s: 100% in them, 10% waiting"


def test_times_that_a_peer_made_up_are_left_out() -> None:
    assert lately([op(100, 1, 50), op(100, 1, 100)]) == ""
    assert lately([op(100, 1, 120), op(20, 1, 40)]) == ""


def test_timings_are_differences_of_the_times_recorded() -> None:
    last = SimpleNamespace(op=Op.COMBINE, start_ns=1000, announced_ns=1020, arrived_ns=1300, end_ns=5300)
    engine: Any = SimpleNamespace(op_record=lambda: last, arrival_ns=lambda: [7, 8], line_latency_ns=lambda: 9.5)
    assert CpuEngine.timings(SimpleNamespace(_engine=engine)) == dict(  # type: ignore[arg-type]
        op="combine", before_ns=20, wait_ns=280, after_ns=4000, arrival_ns=[7, 8], line_latency_ns=9.5
    )
