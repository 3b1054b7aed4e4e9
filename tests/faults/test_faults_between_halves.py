"""Faults between the halves of an op: every rank raises a typed error in its wait or in its next op, and none hangs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from faults import cases_halves as cases
from faults.cases_faults import open_buffer
from support.ranks import ProcessRanks, Ranks, ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.engine.engine import Engine
from moe_rt.errors import MoeRtError

MakeRanks = Callable[[str, int], Ranks]
SIZE = 3


@pytest.mark.parametrize(
    ("fault", "error", "depth"),
    [
        ("dies", "PeerDead", 1),
        ("raises", "GroupPoisoned", 1),
        ("closes", "GroupClosed", 1),
        ("aborts", "GroupPoisoned", 1),
        ("dies", "PeerDead", 2),
        ("raises", "GroupPoisoned", 2),
        ("closes", "GroupClosed", 2),
    ],
)
def test_rank_that_fails_between_the_halves(fault: str, error: str, depth: int) -> None:
    """It has announced the ops under way, so peers may receive them; the next op fails on all of them."""
    ranks = ProcessRanks(SIZE)
    outcomes = ranks.outcomes(cases.between, fault, depth)
    ranks.close()
    failed = outcomes.pop(cases.FAULTY_RANK)
    if fault == "dies":
        assert isinstance(failed, ChildProcessError)
    elif fault == "raises":
        assert isinstance(failed, ZeroDivisionError)
    else:
        assert failed[0].startswith("GroupClosed: "), failed
    for *waits, after in outcomes:
        assert all(waited == "ok" or waited.startswith((error, "GroupPoisoned")) for waited in waits), outcomes
        assert after.startswith((error, "GroupPoisoned")), outcomes
    assert any(after.startswith(error) for *_, after in outcomes), outcomes


def check_closed(found: list[list[str]], who: int) -> None:
    """Check what ranks see of rank `who`, which closed after 1, 2 ... dispatches."""
    assert all(text.startswith("GroupClosed: ") for text in found.pop(who))
    for count, texts in enumerate(zip(*found, strict=True), start=1):
        assert all(text.startswith(("GroupClosed: ", "GroupPoisoned: ")) for text in texts), texts
        expected = f"it announced op {count}, expected {count + 1}"
        seen = [text for text in texts if text.startswith(f"GroupClosed: dispatch #{count + 1} on rank")]
        assert any(expected in text for text in seen), texts


@pytest.mark.parametrize(("nodes", "route"), [(None, "flat"), ((0, 1, 2), "two_level")])
def test_rank_that_closed_in_any_channel(nodes: tuple[int, ...] | None, route: str) -> None:
    """It is noticed before the timeout, with its number of ops, in every channel that the next op may be in."""
    found = ThreadRanks(SIZE, nodes=nodes).run(partial(cases.closed_after, route=route), cases.FAULTY_RANK, 3)
    check_closed(found, cases.FAULTY_RANK)


@pytest.mark.parametrize("depth", [1, 2])
def test_forked_child(make_ranks: MakeRanks, depth: int) -> None:
    for of_child, of_parent in make_ranks("shm", 2).run(cases.fork_between, depth):
        for line in of_child.split("\n"):
            assert line.startswith("GroupClosed: "), of_child
            assert "after fork" in line
        assert of_parent == "\n".join(["ok"] * depth)


@pytest.mark.parametrize("depth", [1, 2])
def test_interrupted_wait(make_ranks: MakeRanks, depth: int) -> None:
    """The wait for the last op, which first ends the others, is interrupted."""
    first, second = make_ranks("shm", 2).run(cases.interrupted_wait, depth)
    assert first[0].startswith("KeyboardInterrupt"), first
    assert all(text.startswith("GroupPoisoned: ") for text in first[1:]), first
    assert all(text.startswith("GroupPoisoned: ") for text in second), second


def test_two_threads_wait(make_ranks: MakeRanks) -> None:
    """One of them is refused, and the other receives the op."""
    seen = make_ranks("shm", 2).run(cases.two_waits)[0]
    assert seen[0].startswith("ConcurrentUse: "), seen
    assert seen[1] == "ok"


def test_ops_that_are_never_waited_for_leave_nothing(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 2).run(cases.lost_buffers, 6, 2) == [0, 0]


def failed_by_the_next_call() -> weakref.ref[Engine]:
    """Begin an op of rows that an earlier op computed. The next call ends it, and fails. Return the buffer's engine."""
    buffer = open_buffer(ThreadGroup.make(1)[0], heap="threads")
    x = torch.ones(4, buffer.spec.hidden, requires_grad=True)
    idx, weights = torch.zeros(4, buffer.spec.num_topk).long(), torch.ones(4, buffer.spec.num_topk)
    out = buffer.combine(*buffer.dispatch(x, idx, weights))
    buffer.dispatch(out, idx, weights, wait=False)
    buffer.abort(ValueError("a mistake on purpose"))
    with pytest.raises(MoeRtError):
        buffer.dispatch(out, idx, weights)
    return weakref.ref(buffer._engine)


def test_a_failed_op_keeps_no_engine() -> None:
    """Neither its error's frames nor the graph of its rows lead back to the engine."""
    engine = failed_by_the_next_call()
    gc.collect()
    assert engine() is None
