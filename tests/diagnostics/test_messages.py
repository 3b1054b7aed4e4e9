"""Every error names its documentation section, keeps all fields when pickled, and names no innocent rank."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CPU_HEAPS, HEAPS
from diagnostics import cases_diagnostics as cases
from support.ranks import Ranks

from moe_rt import ThreadGroup, errors
from moe_rt.errors import MoeRtError, Op, Phase

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from check_tree import headings  # noqa: E402

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 3
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, MoeRtError)]
ANCHORS = headings((ROOT / "docs" / "errors.md").read_text())


@pytest.mark.parametrize("kind", CLASSES)
def test_messages_end_with_their_section(kind: type[MoeRtError]) -> None:
    section = f"(moe-rt docs errors#{kind.__name__.lower()})"
    assert kind.__name__.lower() in ANCHORS
    assert str(kind("got 1, expected 2")) == f"got 1, expected 2 {section}"
    assert str(kind(f"rank 1 refused: {kind('got 1')}")) == f"rank 1 refused: got 1 {section}", "once"
    assert str(type("Derived", (kind,), {})("got 1")).endswith(section), "a class from elsewhere has no section"


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_are_pickled_whole(kind: type[MoeRtError]) -> None:
    """Errors keep all their fields when pickled: multiprocessing sends a rank's error to its parent as a pickle."""
    report = cases.good_rounds(ThreadGroup.make(1)[0], 1)
    error = kind("got 1", rank=1, peer=2, op=Op.COMBINE, seq=3, phase=Phase.WAIT, report=report)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), vars(copy)) == (str(error), vars(error))


CALLS = {
    "layer": ("dispatch #1 of layer tag 1", "dispatch #1 of layer tag 2"),
    "op": ("dispatch #2 of layer tag 1", "combine #1 of layer tag 1 (handle of dispatch #1)"),
    "handle": (
        "combine #1 of layer tag 1 (handle of dispatch #2)",
        "combine #1 of layer tag 1 (handle of dispatch #1)",
    ),
}


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("what", CALLS)
def test_both_calls_are_named_and_neither_is_blamed(make_ranks: MakeRanks, heap: str, what: str) -> None:
    outcomes = make_ranks(heap, 2).run(cases.differing_calls, FAULTY_RANK, what)
    assert any(text.startswith("CallOrderMismatch:") for text, _ in outcomes), outcomes
    said = "rank 0 called {}; rank 1 called {}".format(*CALLS[what])
    for text, peer in outcomes:
        assert said in text.splitlines()[0], outcomes
        if text.startswith("CallOrderMismatch:"):
            assert peer == -1
            assert "all ranks must issue the same ops in the same order" in text


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_of_three_the_outvoted_is_named(make_ranks: MakeRanks, heap: str) -> None:
    outcomes = make_ranks(heap, SIZE).run(cases.differing_calls, FAULTY_RANK, "layer")
    mismatches = [(text, peer) for text, peer in outcomes if text.startswith("CallOrderMismatch:")]
    assert mismatches, outcomes
    for text, peer in mismatches:
        assert "ranks 0 and 2 called dispatch #1 of layer tag 1; rank 1 called dispatch #1 of layer tag 2" in text
        assert peer == FAULTY_RANK


def test_cuda_ranks_name_both_calls(make_ranks: MakeRanks) -> None:
    outcomes = make_ranks("loopback", 2).run(cases.differing_calls, FAULTY_RANK, "layer")
    mismatches = [(text, peer) for text, peer in outcomes if text.startswith("CallOrderMismatch:")]
    assert mismatches, outcomes
    for text, peer in mismatches:
        assert "rank 0 called dispatch of layer tag 1" in text
        assert "rank 1 called dispatch of layer tag 2" in text
        assert peer == -1


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_buffers_in_crossed_order(make_ranks: MakeRanks, heap: str) -> None:
    """Errors on both ranks name the other buffer in which rank 1 waits; rank 0 times out first."""
    for text in make_ranks(heap, 2).run(cases.crossed_buffers):
        assert text.startswith(("PeerTimeout:", "GroupPoisoned:")), text
        said = "rank 1 waits in dispatch #1 of another buffer of 2 ranks, for this rank"
        assert f"{said}: all ranks must use their buffers in the same order" in text.splitlines()[0], text


def test_a_buffer_of_some_ranks_that_the_waiting_rank_has_no_part_in(make_ranks: MakeRanks) -> None:
    """Ranks are named as they are counted there, and rank 0 is not taken for one that rank 1 waits for."""
    first, _, told = (text.splitlines()[0] for text in make_ranks("shm", SIZE).run(cases.crossed_with_some))
    assert first.startswith("PeerTimeout:"), first
    said = (
        "rank 0 failed first: PeerTimeout, concerning rank 1; rank 1 waits in dispatch #1 of another buffer of 2 ranks"
    )
    assert f"{said}, for this rank" in told
    assert "rank 1 waits in dispatch #1 of another buffer of 2 ranks, for rank 1 there" in first


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_a_rank_that_is_only_late_is_in_no_other_buffer(make_ranks: MakeRanks, heap: str) -> None:
    for text in make_ranks(heap, 2).run(cases.late_beside_a_used_buffer)[:1]:
        assert text.startswith("PeerTimeout:")
        assert "another buffer" not in text
        assert "a rank without tokens must call, too, with T = 0" in text


@pytest.mark.parametrize("heap", HEAPS)
def test_one_batch_less_on_a_rank(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, 2).run(cases.one_batch_less, FAULTY_RANK)
    assert texts[0].startswith("GroupClosed:"), texts
    assert "rank 1 closed its buffer" in texts[0]
    assert "a rank without tokens must call, too, with T = 0" in texts[0]
