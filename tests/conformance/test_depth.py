"""Buffers of depth D: up to D ops under way give the bits of whole ops, whatever each rank waits for and when."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS, HEAPS
from support.emulated_gpu import EmulatedGpu
from support.ranks import Ranks
from support.rounds import one_round, outcome
from support.routing import buffer_kwargs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer, ThreadGroup
from moe_rt.buffer.pending import Pending
from moe_rt.errors import ConfigMismatch, GroupClosed, InvalidConfig, InvalidInput, Op

MakeRanks = Callable[[str, int], Ranks]
STEPS = ("dispatch", "combine", "combine_backward", "dispatch_backward")


def rank_of(group: Any) -> int:
    return group.rank if isinstance(group.rank, int) else int(group.rank())


class Batch:
    """One rank's batch on its way through the four ops, each of which needs the results of the one before."""

    def __init__(self, buffer: Buffer, number: int) -> None:
        self.engine, self.rank, self.tag = buffer._engine, buffer.rank, number
        tokens = [(5 * r + 7 * number) % 13 for r in range(buffer.num_ranks)]
        inputs = make_inputs(buffer.spec, tokens, number, "random")
        self.x, self.idx, self.weights = (each[self.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))
        self.results: list[tuple[Tensor, ...]] = []
        self.ticket: Tensor | None = None

    @property
    def step(self) -> int:
        return len(self.results)

    def _given(self) -> tuple[Any, ...]:
        if self.step == 0:
            return self.x, self.idx, self.weights, self.tag, None
        recv_x, recv_weights, _, *plans = self.results[0]
        if self.step == 1:
            return recv_x, recv_weights, *plans, self.tag
        if self.step == 2:
            return self.x, recv_x, recv_weights, plans[0], self.tag
        return *self.results[2], *plans, self.tag

    def run(self) -> None:
        self._keep(getattr(self.engine, STEPS[self.step])(*self._given()))

    def begin(self) -> None:
        name = STEPS[self.step]
        self.ticket = self.engine.begin(Op[name.upper()], name, *self._given())

    def wait(self) -> None:
        ticket, self.ticket = self.ticket, None
        assert ticket is not None
        self._keep(self.engine.finish(STEPS[self.step], ticket))

    def _keep(self, outputs: Any) -> None:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if self.step == 0:  # rows past the last one are unspecified, and so is the plan's end
            rows = int(outputs[2][-1])
            outputs[0][rows:], outputs[1][rows:] = 0, 0
        if self.step == 2:
            rows = int(self.results[0][2][-1])
            outputs[0][rows:], outputs[1][rows:] = 0, 0
        self.results.append(outputs)

    def values(self) -> list[Tensor]:
        of_dispatch, *others = self.results
        return [*of_dispatch[:3], *(t for outputs in others for t in outputs)]


def random_chain(group: Any, num_ops: int, seed: int, depth: int, route: str = "auto") -> int:
    """Run whole chains, then the same with all ranks' ops in one random order, and each rank's waits in its own."""
    order, pace = random.Random(seed), random.Random(f"{seed} {rank_of(group)}")
    size = group.size if isinstance(group.size, int) else group.size()
    spec = make_spec(size, dtype=torch.bfloat16, depth=depth, route=route)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        one_round(buffer, make_inputs(spec, [(5 * r) % 13 for r in range(size)], 7), seed=7)
        expected = []
        for number in range(4):
            batch = Batch(buffer, number)
            for _ in STEPS:
                batch.run()
            expected.append([t.clone() for t in batch.values()])
        live, most = [Batch(buffer, i) for i in range(depth + 1)], 0
        for _ in range(num_ops):
            batch = order.choice(live)
            if batch.ticket is not None:
                batch.wait()
            if batch.step == len(STEPS):
                torch.testing.assert_close(batch.values(), expected[batch.tag], rtol=0, atol=0)
                live.remove(batch)
                batch = Batch(buffer, (batch.tag + 1) % 4)
                live.append(batch)
            if pace.random() < 0.05:
                time.sleep(pace.random() * 0.003)
            under_way = [b for b in live if b.ticket is not None]
            if len(under_way) == depth or (under_way and pace.random() < 0.2):
                pace.choice(under_way).wait()  # one that began later first ends those before
            if pace.random() < 0.3 and sum(b.ticket is not None for b in live) < depth:
                batch.run()
            else:
                batch.begin()
                most = max(most, sum(b.ticket is not None for b in live))
        for batch in live:
            if batch.ticket is not None:
                batch.wait()
        one_round(buffer, make_inputs(spec, [(3 * r) % 13 for r in range(size)], 8), seed=8)
    return most


@pytest.mark.parametrize(("heap", "size", "depth"), [(heap, 3, 2) for heap in HEAPS] + [("threads", 2, 3)])
def test_chain(make_ranks: MakeRanks, heap: str, size: int, depth: int) -> None:
    num_ops = 400 if heap in CPU_HEAPS else 12  # an emulated launch starts threads
    assert make_ranks(heap, size).run(random_chain, num_ops, depth, depth) == [depth] * size


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_long_chains(make_ranks: MakeRanks, heap: str, seed: int) -> None:
    make_ranks(heap, 3).run(random_chain, 5000, seed, 2 + seed % 3)


class Case:
    """A buffer of depth 2, or another one, with the inputs of one rank; expected holds recv_x of a whole dispatch."""

    def __init__(self, group: Any, depth: int = 2, **changes: Any) -> None:
        self.rank, self.spec = rank_of(group), make_spec(2, depth=depth, **changes)
        self.buffer = Buffer(group, timeout_s=60.0, **buffer_kwargs(self.spec))
        inputs = make_inputs(self.spec, [7, 5], 1, "topk")
        self.x, self.idx = inputs.xs[self.rank], inputs.topk_idx[self.rank]
        self.weights = inputs.topk_weights[self.rank]
        self.expected = self.whole()

    def begin(self, tag: int = 0, factor: float = 1.0) -> Pending[Any]:
        return self.buffer.dispatch(self.x * factor, self.idx, self.weights, tag=tag, wait=False)

    def whole(self) -> Any:
        return self.buffer.dispatch(self.x, self.idx, self.weights)

    def whole_after_refusal(self) -> Any:
        kind, text = outcome(self.whole)
        assert (kind, "depth = 2" in text) == (InvalidInput.__name__, True), text
        return self.whole()

    def check(self, received: Any, factor: float = 1.0) -> None:
        rows = int(self.expected[2].offs[-1])
        assert torch.equal(received[0][:rows], factor * self.expected[0][:rows])


def waits_in_any_order(group: Any) -> list[tuple[str, str]]:
    case = Case(group)
    first, second = case.begin(), case.begin(factor=2.0)
    case.check(second.wait(), 2.0)  # has ended the first
    case.check(case.whole())
    case.check(first.wait())
    first, third = case.begin(), case.begin(factor=4.0)
    thread = threading.Thread(target=lambda: case.check(third.wait(), 4.0))
    thread.start()
    thread.join()
    case.begin(), case.begin()  # what the first has received is forgotten now
    forgotten = outcome(first.wait)
    recv_x, recv_weights, handle = case.whole_after_refusal()
    returning, fourth = case.buffer.combine(recv_x, recv_weights, handle, wait=False), case.begin(factor=8.0)
    case.check(fourth.wait(), 8.0)
    assert torch.equal(returning.wait(), case.buffer.combine(recv_x, recv_weights, handle))
    twice = outcome(fourth.wait)
    lost = case.begin()
    case.buffer.close()
    return [forgotten, twice, outcome(lost.wait)]


@pytest.mark.parametrize("heap", ["threads", "shm"])
def test_waits_in_any_order(make_ranks: MakeRanks, heap: str) -> None:
    for forgotten, twice, closed in make_ranks(heap, 2).run(waits_in_any_order):
        assert forgotten[0] == twice[0] == InvalidInput.__name__
        assert "waited for already, or lost" in forgotten[1]
        assert closed[0] == GroupClosed.__name__


def too_many(group: Any, who: list[int], then: str) -> tuple[str, str]:
    """Ranks in `who` call a third op before they wait; the others have waited for the first."""
    case = Case(group)
    first, second = case.begin(tag=3), case.begin(tag=4, factor=2.0)
    if case.rank not in who:
        case.check(first.wait())
    calls: dict[str, Callable[[], Any]] = {"whole": case.whole, "begin": case.begin}
    if case.rank not in who and then == "begin":
        calls = {"begin": lambda: case.begin().wait()}
    found = outcome(calls[then])
    if case.rank in who:
        case.check(first.wait())
    case.check(second.wait(), 2.0)
    case.check(case.whole())
    case.buffer.close()
    return found


@pytest.mark.parametrize("then", ["begin", "whole"])
@pytest.mark.parametrize("who", [[0], [0, 1]])
def test_more_than_may_be_under_way(make_ranks: MakeRanks, then: str, who: list[int]) -> None:
    """Every rank refuses it, after the ops before have ended on it, and these keep their results."""
    found = make_ranks("shm", 2).run(too_many, who, then)
    assert [kind for kind, _ in found] == [InvalidInput.__name__] * 2
    assert all("while dispatch of layer tag 3 was begun" in found[rank][1] for rank in who), found


def refused_under_way(group: Any) -> list[tuple[str, str]]:
    """One of two ops under way has a bad id; then a combine with a handle of another buffer is begun after a third."""
    case = Case(group)
    good = case.idx.clone()
    if case.rank == 1:
        case.idx[0, 0] = 99
    bad = case.begin()
    case.idx.copy_(good)
    second = case.begin(factor=2.0)
    found = [outcome(bad.wait)]
    case.check(second.wait(), 2.0)
    recv_x, recv_weights, handle = case.whole()
    third = case.begin(factor=4.0)
    if case.rank == 1:
        handle.recv_plan[0] += 1
    found.append(outcome(lambda: case.buffer.combine(recv_x, recv_weights, handle, wait=False).wait()))
    case.check(third.wait(), 4.0)
    case.check(case.whole())
    case.buffer.close()
    return found


@pytest.mark.parametrize("heap", ["threads", "shm"])
def test_refusal_of_one_of_two(make_ranks: MakeRanks, heap: str) -> None:
    for found in make_ranks(heap, 2).run(refused_under_way):
        assert [kind for kind, _ in found] == ["InvalidRouting", "InvalidInput"]


def other_order(group: Any, kinds: str) -> str:
    """Rank 1 begins two ops in the other order."""
    case = Case(group)
    recv_x, recv_weights, handle = case.expected
    begins = {
        "dispatch": lambda: case.begin(tag=1),
        "other dispatch": lambda: case.begin(tag=2),
        "combine": lambda: case.buffer.combine(recv_x, recv_weights, handle, wait=False),
    }
    names = kinds.split(", ")

    def all_calls() -> None:
        first, second = (begins[name]() for name in (names if case.rank == 0 else names[::-1]))
        for call in (second.wait, first.wait, case.whole):
            call()

    found = outcome(all_calls)[0]  # each call may be the first to see that the peer has failed
    case.buffer.close()
    return found


@pytest.mark.parametrize("kinds", ["dispatch, combine", "dispatch, other dispatch"])
def test_ranks_that_begin_in_another_order(make_ranks: MakeRanks, kinds: str) -> None:
    found = make_ranks("threads", 2).run(other_order, kinds)
    assert "CallOrderMismatch" in found
    assert set(found) <= {"CallOrderMismatch", "GroupPoisoned", "PeerDead"}


_reported = threading.Event()


def first_is_awaited(group: ThreadGroup) -> str:
    """Rank 1 is late for two ops. Return what rank 0 reports."""
    case = Case(group)
    if case.rank == 1:
        assert _reported.wait(60.0)
    first, second = case.begin(), case.begin(factor=2.0)
    text = str(case.buffer.report()) if case.rank == 0 else ""
    _reported.set()
    case.check(second.wait(), 2.0)
    case.check(first.wait())
    ops = case.buffer.report().ranks[case.rank].last_ops
    assert [(op.seq, op.status) for op in ops] == [(1, "ok"), (2, "ok"), (3, "ok")]
    case.buffer.close()
    return text


def test_report_names_the_first_op_under_way(make_ranks: MakeRanks) -> None:
    _reported.clear()
    text = make_ranks("threads", 2).run(first_is_awaited)[0]
    assert "rank 1 has not announced dispatch #2, for which rank 0 waits" in text


def windows_under_way(group: Any) -> None:
    """Write rows in place while another op is under way."""
    case = Case(group)
    first = case.begin()
    window = case.buffer.token_window(len(case.x))
    window.copy_(case.x * 2)
    second = case.buffer.dispatch(window, case.idx, case.weights, wait=False)
    found = outcome(lambda: case.buffer.token_window(1))
    assert (found[0], "depth = 2" in found[1]) == (InvalidInput.__name__, True), found
    case.check(first.wait())
    case.check(second.wait(), 2.0)
    case.buffer.close()


@pytest.mark.parametrize("heap", ["threads", "loopback"])
def test_token_window(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks(heap, 2).run(windows_under_way)


def one_rank(**options: Any) -> Buffer:
    sizes = dict(num_max_tokens_per_rank=4, hidden=8, num_topk=2, num_experts=4, dtype=torch.float64)
    return Buffer(ThreadGroup.make(1)[0], **{**sizes, **options})


@pytest.mark.parametrize("depth", [0, -1, 1.5, None])
def test_depth_out_of_range(depth: Any) -> None:
    with pytest.raises(InvalidConfig, match="depth: got"):
        one_rank(depth=depth)


def test_retry_is_refused() -> None:
    """Ranks repeat an overflowed dispatch when they wait for it, and may wait in any order."""
    with pytest.raises(InvalidConfig, match="depth = 2"):
        one_rank(depth=2, overflow="retry", capacity_factor=1.0)


@pytest.mark.emulated("has few multiprocessors")
def test_waits_of_all_ops_under_way_fit_on_a_gpu() -> None:
    """Each op that may be under way may wait on another stream, while another launch sends."""
    gpu = EmulatedGpu(num_sms=3)
    with pytest.raises(InvalidConfig, match="got 3 waits of virtual ranks, ranks times depth, on a GPU of 3"):
        Buffer(ThreadGroup.make(1, gpu)[0], **buffer_kwargs(make_spec(1, depth=3)))


def different_depths(group: Any) -> str:
    try:
        Case(group, depth=1 + rank_of(group))
    except ConfigMismatch as error:
        return str(error)
    return ""


def test_ranks_agree_on_the_depth(make_ranks: MakeRanks) -> None:
    assert all("depth" in text for text in make_ranks("threads", 2).run(different_depths))


def two_batches(buffer: Buffer, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """Run two batches whose dispatches are under way together, and then their combines."""
    first = buffer.dispatch(x, idx, weights, wait=False)
    second = buffer.dispatch(x.sin(), idx, weights, wait=False)
    rows, recv_weights, handle = first.wait()
    returning = buffer.combine(rows * 2, recv_weights, handle, wait=False)
    rows, recv_weights, handle = second.wait()
    other = buffer.combine(rows.cos(), recv_weights, handle, wait=False)
    return returning.wait() + 3 * other.wait()


def whole_batches(buffer: Buffer, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    rows, recv_weights, handle = buffer.dispatch(x, idx, weights)
    out = buffer.combine(rows * 2, recv_weights, handle)
    rows, recv_weights, handle = buffer.dispatch(x.sin(), idx, weights)
    return out + 3 * buffer.combine(rows.cos(), recv_weights, handle)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(compiled: bool) -> None:
    """Backward begins and ends the backward ops in the reverse order."""
    run = torch.compile(two_batches, fullgraph=True, backend="aot_eager") if compiled else two_batches
    with one_rank(depth=2) as buffer:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4, 8, dtype=torch.float64, generator=generator).requires_grad_()
        weights = torch.rand(4, 2, dtype=torch.float64, generator=generator).requires_grad_()
        idx = torch.tensor([[t % 4, (t + 1) % 4] for t in range(4)])
        found = []
        for call in (whole_batches, run):
            out = call(buffer, x, idx, weights)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), (x, weights))])
        torch.testing.assert_close(found[1], found[0])
        if not compiled:
            assert torch.autograd.gradcheck(lambda x, w: two_batches(buffer, x, idx, w), (x, weights))


def test_ops_that_others_have_ended_are_forgotten() -> None:
    """No more of them are kept than may be under way, with their tensors."""
    with one_rank(depth=2) as buffer:
        x, weights = torch.ones(4, 8, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)
        idx = torch.tensor([[0, 1]] * 4)
        for _ in range(5):
            buffer.dispatch(x, idx, weights, wait=False)
            buffer.dispatch(x, idx, weights)
        assert len(buffer._engine._begun) == 2
