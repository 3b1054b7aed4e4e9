"""Reports from inside a group: op records, waits, conclusions, and what errors say."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CPU_HEAPS
from diagnostics import cases_diagnostics as cases
from faults.cases_faults import good_round, open_buffer
from support.cpp_programs import compile_program
from support.emulated_gpu import EmulatedGpu
from support.ranks import ProcessRanks, Ranks, meet

from moe_rt import ThreadGroup
from moe_rt.diagnostics.collect import stragglers
from moe_rt.diagnostics.report import REPORT_DIR, keep
from moe_rt.errors import GroupClosed, InvalidConfig, InvalidInput, InvalidRouting, PeerTimeout

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 3


@pytest.mark.parametrize(
    ("waits_for", "expected"),
    [
        ([set(), set()], []),
        ([{1}, {2}, set()], [2]),
        ([{1, 2}, set(), set()], [1, 2]),
        ([{1, 2}, {2}, set(), {0}], [2]),
        ([{1}, {0}, {0}], [0, 1]),  # ranks that issue different ops wait for each other
        ([{1}, {2}, {1, 3}, set()], [3]),
    ],
)
def test_stragglers_are_where_chains_end(waits_for: list[set[int]], expected: list[int]) -> None:
    assert stragglers(waits_for) == expected


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_error_names_the_straggler(make_ranks: MakeRanks, heap: str) -> None:
    outcomes = make_ranks(heap, SIZE).run(cases.late_rank, FAULTY_RANK, 5.0)
    said = (
        f"rank {FAULTY_RANK} has not announced dispatch #2, for which ranks 0 and 2 wait; it last finished combine #1 "
    )
    for rank in (0, 2):
        text, report, after = outcomes[rank]
        assert text.startswith(("PeerTimeout: ", "GroupPoisoned: ")), text
        assert said in text.splitlines()[1]
        assert report is not None
        assert report.stragglers == after.stragglers == [FAULTY_RANK]
        assert report.ranks[rank].waits_for == [FAULTY_RANK]
        assert report.ranks[rank].announced == {"dispatch": 2, "combine": 1}
        assert report.ranks[FAULTY_RANK].announced == {"dispatch": 1, "combine": 1}
        failed = report.ranks[rank].last_ops[-1]
        assert failed.status in ("peer_timeout", "poisoned")
        assert (failed.announced_ns > 0, failed.arrived_ns) == (True, 0), "not all peers' signals have arrived"
        assert report.ranks[rank].poison.startswith("peer_timeout, found by rank ")
    assert any(text.startswith(PeerTimeout.__name__) for text, *_ in outcomes)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_report_while_ranks_wait(make_ranks: MakeRanks, heap: str) -> None:
    for report in make_ranks(heap, SIZE).run(cases.watched_from_a_thread, FAULTY_RANK)[::2]:
        assert report.stragglers == [FAULTY_RANK]
        assert [r.waits_for for r in report.ranks] == [[FAULTY_RANK], [], [FAULTY_RANK]]
        assert report.ranks[0].state.startswith("has waited in dispatch #2 for rank 1 for ")
        assert report.ranks[0].last_ops[-1].phase == "wait"
        assert [r.poison for r in report.ranks] == [""] * SIZE
        assert "rank 1 has not announced dispatch #2, for which ranks 0 and 2 wait" in str(report)


def test_last_ops_of_a_dead_rank() -> None:
    ranks = ProcessRanks(SIZE)
    outcomes = ranks.outcomes(cases.killed_rank, FAULTY_RANK)
    pid = ranks.pids[FAULTY_RANK]
    ranks.close()
    for rank in (0, 2):
        dead = outcomes[rank].ranks[FAULTY_RANK]
        assert (dead.process, dead.pid, dead.problem) == ("dead", pid, "")
        assert [(op.op, op.seq, op.status) for op in dead.last_ops] == [("dispatch", 1, "ok"), ("combine", 1, "ok")]
        assert outcomes[rank].stragglers == [FAULTY_RANK]
        assert f"it is dead (process {pid}), last finished combine #1 " in str(outcomes[rank])


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_closed_rank_is_reported(make_ranks: MakeRanks, heap: str) -> None:
    states = make_ranks(heap, SIZE).run(cases.closing_rank, FAULTY_RANK)
    assert states[FAULTY_RANK].startswith(GroupClosed.__name__)
    assert states[0].startswith("has closed its buffer, last finished combine #1")


def test_a_segment_that_names_another_rank_is_not_believed(make_ranks: MakeRanks) -> None:
    """A mapping whose segment names another rank is reported as a problem, here with two ranks' segments swapped."""
    for report in make_ranks("threads", 2).run(cases.swapped_segments):
        said = [f"rank: got {1 - rank} of 2, expected {rank} of 2" for rank in range(2)]
        assert [rank.problem for rank in report.ranks] == said
        assert [rank.last_ops for rank in report.ranks] == [[], []]


def test_ring_keeps_the_last_ops() -> None:
    ops = cases.good_rounds(ThreadGroup.make(1)[0], 50).ranks[0].last_ops
    assert [(op.op, op.seq) for op in ops] == [(kind, n) for n in range(19, 51) for kind in ("dispatch", "combine")]
    for op, then in itertools.pairwise(ops):
        assert op.start_ns <= op.announced_ns <= op.arrived_ns <= op.end_ns <= then.start_ns
    assert ops[-1].num_tokens > 0


def test_refusal_is_recorded() -> None:
    with open_buffer(ThreadGroup.make(1)[0]) as buffer:
        spec = buffer.spec
        idx = torch.full((4, spec.num_topk), spec.num_experts)
        with pytest.raises(InvalidRouting) as raised:
            buffer.dispatch(torch.zeros(4, spec.hidden), idx, torch.ones(4, spec.num_topk), tag=3)
        last = buffer.report().ranks[0].last_ops[-1]
    assert (last.op, last.status, last.tag) == ("dispatch", "invalid_routing", 3)
    assert last.announced_ns <= last.arrived_ns <= last.end_ns
    assert raised.value.report is None


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_waits_count_for_the_late_peer(make_ranks: MakeRanks, heap: str) -> None:
    outcomes = make_ranks(heap, SIZE).run(cases.waiting_times, FAULTY_RANK, 1.0)
    for rank in (0, 2):
        waited, took_ns, arrivals, report = outcomes[rank]
        assert len(waited) == SIZE
        assert arrivals == sorted(arrivals), "peers are awaited in rank order"
        assert arrivals[FAULTY_RANK] > 0.8e9
        assert 0.8e9 < waited[FAULTY_RANK] < took_ns
        assert max(ns for peer, ns in enumerate(waited) if peer != FAULTY_RANK) < waited[FAULTY_RANK] / 2
        late = report.ranks[rank].last_ops[2]
        assert (late.longest_peer, late.longest_ns > 0.8e9) == (FAULTY_RANK, True)


def test_cuda_ranks_are_not_watched() -> None:
    with open_buffer(ThreadGroup.make(1, EmulatedGpu())[0]) as buffer:
        assert buffer.waited_ns() == []
        with pytest.raises(InvalidConfig, match="expected a CPU buffer"):
            buffer.report()


def test_report_goes_to_a_file(make_ranks: MakeRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORT_DIR, str(tmp_path))
    _, report, _ = make_ranks("threads", 2).run(cases.late_rank, 1, 4.0)[0]
    (path,) = tmp_path.glob("moe_rt-rank0-*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_text())
    assert document == {**json.loads(report.to_json()), "path": ""}
    assert str(report).endswith(f"\nthe whole report: {path}")
    later = keep(replace(report, time_ns=report.time_ns + 1), 0)
    assert Path(later.path) != path
    assert json.loads(Path(later.path).read_text())["time_ns"] == report.time_ns + 1


def fails_twice(group: ThreadGroup) -> list[str]:
    """Rank 0 waits for rank 1 until the timeout, and then calls again. Return the files that its errors name."""
    buffer, paths = open_buffer(group, timeout_s=0.2), []
    for _ in range(2 * (group.rank == 0)):
        with pytest.raises(PeerTimeout) as raised:
            good_round(buffer)
        assert raised.value.report is not None
        paths.append(raised.value.report.path)
    meet(group)
    return paths


def test_later_errors_name_the_first_report(
    make_ranks: MakeRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORT_DIR, str(tmp_path))
    paths, _ = make_ranks("threads", 2).run(fails_twice)
    assert paths == [str(path) for path in tmp_path.iterdir()] * 2


def test_a_refusal_in_place_of_a_dispatch_has_the_tag_of_its_layer() -> None:
    with open_buffer(ThreadGroup.make(1)[0]) as buffer:
        with pytest.raises(InvalidInput, match="wrong"):
            buffer.refuse(InvalidInput("wrong"), tag=7)
        (op,) = buffer.report().ranks[0].last_ops
        assert (op.op, op.tag, op.status) == ("dispatch", 7, "invalid_input")


def test_missing_directory_is_a_warning(make_ranks: MakeRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORT_DIR, str(tmp_path / "missing"))
    with pytest.warns(UserWarning, match=REPORT_DIR):
        text, report, _ = make_ranks("threads", 2).run(cases.late_rank, 1, 4.0)[0]
    assert text.startswith("PeerTimeout")
    assert report.path == ""


@pytest.fixture(scope="module")
def slot_program() -> Path:
    return compile_program(Path(__file__).with_name("op_record_slot.cpp"), "-O2")


def test_no_reader_takes_a_torn_op_record_for_whole(slot_program: Path) -> None:
    done = subprocess.run([slot_program, "mixtures"], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout


def test_what_recording_an_op_costs_is_measured(slot_program: Path) -> None:
    done = subprocess.run([slot_program, "cost"], capture_output=True, text=True, timeout=3000, check=True)
    print(done.stdout)
    assert float(done.stdout.split()[0]) > 0
