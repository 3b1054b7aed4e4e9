"""Reports of two-level ops: each rank's node, the proxies and their clients, and the rank that has to pass an op on."""

from __future__ import annotations

import io
import mmap
import os
import struct
from dataclasses import replace

import pytest
from diagnostics import cases_diagnostics as cases
from faults.cases_faults import good_round, open_buffer
from rich.console import Console
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.diagnostics.collect import _conclude, report_on
from moe_rt.diagnostics.report import Report
from moe_rt.diagnostics.show import show_report

NODES = (0, 0, 1, 1)
LATE = 3
MEMBERS, MEMBER_BYTES = 72, 16  # offset of the table's offset in the segment header; bytes of pid, node and inode
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def waiting() -> Report:
    """Rank 0's report after rank 3 did not announce its second dispatch, which rank 1 was to pass on to rank 0."""

    def late(group: ThreadGroup) -> tuple[str, Report | None, Report]:
        return cases.late_rank(group, LATE, TIMEOUT_S, route="two_level")

    error, report, _ = ThreadRanks(4, nodes=NODES).run(late)[0]
    assert report is not None, error
    return report


def test_who_forwards_for_whom(waiting: Report) -> None:
    assert [(rank.node, rank.serves) for rank in waiting.ranks] == [(0, [2]), (0, [3]), (1, [0]), (1, [1])]
    printed = io.StringIO()
    Console(file=printed, width=200).print(show_report(waiting))
    assert "node 0: rank 0 (forwards for rank 2), rank 1 (forwards for rank 3)\n" in printed.getvalue()
    assert "node 1: rank 2 (forwards for rank 0), rank 3 (forwards for rank 1)\n" in printed.getvalue()


def test_waits_are_for_whoever_passes_on(waiting: Report) -> None:
    """Ranks wait for the proxy that passes an op on, and the waits lead to the late rank."""
    assert [rank.waits_for for rank in waiting.ranks[:LATE]] == [[1], [LATE], [LATE]]
    assert waiting.stragglers == [LATE]
    assert waiting.conclusion.startswith(
        f"rank {LATE} has not announced dispatch #2, for which ranks 1 and 2 wait; it "
    )


def test_who_has_announced_and_not_passed_on(waiting: Report) -> None:
    ranks = list(waiting.ranks)
    ranks[1] = replace(ranks[1], waits_for=[], announced={"dispatch": 2, "combine": 1})
    said = _conclude(ranks, [1])
    assert said.startswith("rank 1 has not passed on dispatch #2, for which rank 0 waits; it "), said


def test_one_level_has_no_forwarders() -> None:
    outcomes = ThreadRanks(2).run(one_level)
    assert outcomes == [("", [[], []])] * 2


def one_level(group: ThreadGroup) -> tuple[str, list[list[int]]]:
    with open_buffer(group) as buffer:
        good_round(buffer)
        report, printed = buffer.report(), io.StringIO()
        Console(file=printed, width=200).print(show_report(report))
        return "".join(line for line in printed.getvalue().splitlines() if "node" in line), [
            rank.serves for rank in report.ranks
        ]


@pytest.mark.parametrize("node", [-(2**31), -1, 2, 3, 4, 5, 2**31 - 1])
@pytest.mark.parametrize("rank", [0, LATE])
def test_nodes_that_there_are_not(node: int, rank: int, two_level_segment: bytes) -> None:
    """A node that exists moves the rank and its proxies, even if a node is left empty; others have no proxies."""
    segment = mmap.mmap(-1, len(two_level_segment))
    segment[:] = two_level_segment
    table = struct.unpack_from("<q", segment, MEMBERS)[0]
    struct.pack_into("<i", segment, table + rank * MEMBER_BYTES + 4, node)
    made = report_on([(os.getpid(), 0)] * 4, [segment, None, None, None], [None] * 4)
    assert made.ranks[0].problem == ""
    assert made.ranks[rank].node == node
    if not 0 <= node < 4:
        assert made.ranks[0].serves == []
    assert set(made.ranks[0].serves) <= set(range(4))
    Console(file=io.StringIO()).print(show_report(made))


@pytest.fixture(scope="module")
def two_level_segment() -> bytes:
    return ThreadRanks(4, nodes=NODES).run(own_segment)[0]


def own_segment(group: ThreadGroup) -> bytes:
    with open_buffer(group, route="two_level") as buffer:
        good_round(buffer)
        return bytes(buffer._engine._segments.mappings[buffer.rank])
