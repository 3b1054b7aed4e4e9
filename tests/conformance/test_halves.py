"""Ops in halves give the bits of whole ops, whatever the ranks do between the halves, on every heap.

MOE_RT_TEST_HALVES=1 runs any other test with halves.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HEAPS
from support.halves import halve
from support.ranks import Ranks
from support.rounds import CPU, expected_once, one_round, outcome
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.buffer.pending import Pending
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import GroupClosed, InvalidInput, InvalidRouting
from moe_rt.lab.testing.rounds import play

MakeRanks = Callable[[str, int], Ranks]


def rank_of(group: Any) -> int:
    return group.rank if isinstance(group.rank, int) else int(group.rank())


def round_in_halves(group: Any, spec: BufferSpec, num_tokens: list[int], seed: int, kind: str) -> None:
    """Run a round whole and in halves, and compare both with the reference."""
    inputs = make_inputs(spec, num_tokens, seed, kind)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        whole = one_round(buffer, inputs, seed)
        halve(buffer._engine)
        assert one_round(buffer, inputs, seed) == whole


def chain_in_halves(group: Any, rounds: int, seed: int) -> None:
    """Run whole rounds one after the other; each rank chooses at random which ops to halve and where to sleep."""
    rank, spec = rank_of(group), make_spec(3, dtype=torch.bfloat16)
    pace = random.Random(100 * seed + rank)
    rounds_of = [make_inputs(spec, [(5 * r + i) % 13 for r in range(3)], i, "random") for i in range(4)]
    expected = [expected_once(spec, inputs, i) for i, inputs in enumerate(rounds_of)]

    def between() -> None:
        if pace.random() < 0.3:
            time.sleep(pace.random() * 0.003)

    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        engine = buffer._engine
        whole = {name: getattr(engine, name) for name in ("dispatch", "combine", "dispatch_backward")}
        for i in range(rounds):
            halve(engine, between)
            for name, method in whole.items():
                if pace.random() < 0.3:
                    setattr(engine, name, method)
            play(buffer, rounds_of[i % 4], expected[i % 4], CPU, tag=i)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("heap", HEAPS)
class TestHeap:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_matches_reference(self, make_ranks: MakeRanks, heap: str, size: int, dtype: torch.dtype) -> None:
        tokens = [(5 * r + 12) % 13 for r in range(size)]
        make_ranks(heap, size).run(round_in_halves, make_spec(size, dtype=dtype), tokens, 1, "random")

    def test_few_tokens(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        """A GPU runs whole ops of such a buffer in one launch, and halves in two."""
        spec = make_spec(size, num_max_tokens_per_rank=1)
        make_ranks(heap, size).run(round_in_halves, spec, [1] * size, 2, "topk")

    def test_rows_of_tokens(self, make_ranks: MakeRanks, heap: str, size: int) -> None:
        spec = make_spec(size, layout="tokens", hidden=64, dispatch_dtype=torch.int8)
        make_ranks(heap, size).run(round_in_halves, spec, [12] * size, 3, "random")


@pytest.mark.parametrize("heap", HEAPS)
def test_chain(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks(heap, 3).run(chain_in_halves, 60 if heap != "loopback" else 4, 1)


class Case:
    """Inputs of one rank, and a buffer that is closed at the end."""

    def __init__(self, group: Any, **changes: Any) -> None:
        self.rank, self.spec = rank_of(group), make_spec(2, **changes)
        self.buffer = Buffer(group, timeout_s=60.0, **buffer_kwargs(self.spec))
        inputs = make_inputs(self.spec, [7, 5], 1, "topk")
        self.x, self.idx = inputs.xs[self.rank], inputs.topk_idx[self.rank]
        self.weights = inputs.topk_weights[self.rank]

    def begin(self, tag: int = 0) -> Pending[Any]:
        return self.buffer.dispatch(self.x, self.idx, self.weights, tag=tag, wait=False)

    def whole(self) -> Any:
        return self.buffer.dispatch(self.x, self.idx, self.weights)


def second_op(group: Any, who: list[int], then: str) -> tuple[tuple[str, str], bool]:
    """Ranks in `who` call another op before they wait. Return its outcome, and True if the first op is right."""
    case = Case(group)
    expected = case.whole()[0]
    pending = case.begin(tag=3)
    recv_x = None if case.rank in who else pending.wait()[0]
    if then == "collected":
        del pending
    begins = case.begin if case.rank in who else lambda: case.begin().wait()
    calls = {"begin": begins, "window": lambda: case.buffer.token_window(1)}
    found = outcome(calls.get(then, case.whole))
    if then == "window":
        found = found if case.rank in who else ("InvalidInput", "while dispatch of layer tag 3")
    if recv_x is None and then != "collected":
        recv_x = pending.wait()[0]
    rows = int(case.whole()[2].offs[-1])  # the buffer can be used again
    right = recv_x is None or torch.equal(recv_x[:rows], expected[:rows])
    case.buffer.close()
    return found, right


@pytest.mark.parametrize("heap", ["threads", "shm"])
@pytest.mark.parametrize("then", ["begin", "whole", "collected", "window"])
@pytest.mark.parametrize("who", [[0], [0, 1]])
def test_op_before_the_wait(make_ranks: MakeRanks, heap: str, then: str, who: list[int]) -> None:
    """Every rank refuses it, the first op is received, and the buffer can be used again."""
    outcomes = make_ranks(heap, 2).run(second_op, who, then)
    assert [found[0] for found, _ in outcomes] == ["InvalidInput"] * 2
    assert all("while dispatch of layer tag 3" in outcomes[rank][0][1] for rank in who), outcomes
    assert all(right for _, right in outcomes)


def waits_wrongly(group: Any) -> list[tuple[str, str]]:
    case = Case(group)
    first = case.begin()
    first.wait()
    twice = outcome(first.wait)
    second = case.begin()
    old = outcome(first.wait)
    second.wait()
    third = case.begin()
    case.buffer.close()
    return [twice, old, outcome(third.wait), outcome(case.begin)]


@pytest.mark.parametrize("heap", ["threads", "shm"])
def test_wrong_waits(make_ranks: MakeRanks, heap: str) -> None:
    for twice, old, closed, begun in make_ranks(heap, 2).run(waits_wrongly):
        assert twice[0] == old[0] == InvalidInput.__name__
        assert "waited for already" in twice[1]
        assert closed[0] == begun[0] == GroupClosed.__name__


def waits_on_a_thread(group: Any) -> None:
    case, results = Case(group), list[Any]()
    expected = case.whole()[0]
    pending = case.begin()
    thread = threading.Thread(target=lambda: results.append(pending.wait()))
    thread.start()
    thread.join()
    rows = int(results[0][2].offs[-1])
    assert torch.equal(results[0][0][:rows], expected[:rows])
    case.buffer.close()


@pytest.mark.parametrize("heap", HEAPS)
def test_wait_on_another_thread(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks("shm" if heap == "loopback" else heap, 2).run(waits_on_a_thread)


def bad_id(group: Any) -> tuple[str, str]:
    case = Case(group)
    if case.rank == 1:
        case.idx[0, 0] = 99
    pending = case.begin()
    found = outcome(pending.wait)
    case.idx[0, 0] = 0
    case.whole()
    case.buffer.close()
    return found


@pytest.mark.parametrize("heap", ["threads", "shm"])
def test_refusal_is_raised_by_the_wait(make_ranks: MakeRanks, heap: str) -> None:
    assert {kind for kind, _ in make_ranks(heap, 2).run(bad_id)} == {InvalidRouting.__name__}


def retried(group: Any) -> int:
    case = Case(group, capacity_factor=0.2, overflow="retry")
    recv_x, _, handle = case.begin().wait()
    expected, _, again = case.whole()
    assert torch.equal(recv_x[: handle.offs[-1]], expected[: again.offs[-1]])
    case.buffer.close()
    return len(recv_x)


def test_retry(make_ranks: MakeRanks) -> None:
    make_ranks("shm", 2).run(retried)


def test_an_op_that_was_never_waited_for_keeps_no_engine() -> None:
    """Autograd's nodes of an op's inputs refer to the engine, so an op under way refers to no such node."""
    spec = make_spec(1)
    inputs = make_inputs(spec, [7], 1, "topk")
    buffer = Buffer(ThreadGroup.make(1)[0], **buffer_kwargs(spec))
    received = buffer.dispatch(inputs.xs[0].requires_grad_(), inputs.topk_idx[0], inputs.topk_weights[0])
    buffer.combine(*received, wait=False)
    engine = weakref.ref(buffer._engine)
    del buffer, received
    gc.collect()
    assert engine() is None


def test_rows_in_a_token_window_are_sent_again() -> None:
    """A dispatch that overflowed is repeated after another op has begun, whose window is not theirs."""
    spec = make_spec(1, capacity_factor=0.2, overflow="retry", hidden=16)
    inputs = make_inputs(spec, [7], 1, "topk")
    with Buffer(ThreadGroup.make(1)[0], **buffer_kwargs(spec)) as buffer:
        window = buffer.token_window(7)
        window.copy_(inputs.xs[0])
        recv_x, _, handle = buffer.dispatch(window, inputs.topk_idx[0], inputs.topk_weights[0], wait=False).wait()
        received = int(handle.offs[-1])
        assert spec.capacity(0) < received <= buffer.capacity
        expected, *_ = buffer.dispatch(inputs.xs[0], inputs.topk_idx[0], inputs.topk_weights[0])
        torch.testing.assert_close(recv_x[:received], expected[:received], rtol=0, atol=0)
