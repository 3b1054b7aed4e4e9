"""Ops in halves on an engine of the test: which ops a wait ends, whose error it raises, and what an op keeps alive."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any, NoReturn

import pytest
import torch
from support.halves import OPS
from support.routing import make_spec
from torch import Tensor

from moe_rt.engine.halves import Begun, Halves
from moe_rt.errors import CapacityOverflow, ConcurrentUse, InvalidInput, Op, PeerTimeout


class Engine(Halves):
    """Notes halves; `errors` maps the tag of an op to what its second half raises."""

    def __init__(self, depth: int = 1, grows: bool = False) -> None:
        self.spec, self.rank, self.device = make_spec(1, depth=depth), 3, torch.device("cpu")
        self.noted: list[Any] = []
        self.errors: dict[int, Exception] = {}
        self.grows, self._windows = grows, None
        self.outputs = torch.zeros(2)

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tag: int, max_tokens: Any = None,
                 start: Any = None) -> Any:  # fmt: skip
        if start is None:
            self.noted.append(("whole", tag, x, max_tokens))
            return "repeated"
        start(f"args {tag}", tag, x, topk_idx, None)
        return self.outputs

    def dispatch_scaled(self, x: Tensor, scales: Any, *others: Any, start: Any = None) -> Any:
        return self.dispatch(x, *others, start=start)

    combine = dispatch

    def _refuse_input(self, op: Op, tag: int, message: str, got: int = 0, expected: int = 0) -> NoReturn:
        self.noted.append(("refused", op, tag))
        raise InvalidInput(message)

    def _run_first(self, begun: Begun) -> None:
        self.noted.append(("first", begun.tag))

    def _run_second(self, begun: Begun) -> None:
        self.noted.append(("second", begun.tag))
        if begun.tag in self.errors:
            raise self.errors[begun.tag]

    def _grow(self, max_tokens: int) -> bool:
        self.noted.append(("grow", max_tokens))
        return self.grows

    def _advise(self, error: CapacityOverflow, topk_idx: Tensor) -> None:
        self.noted.append(("advise", error, topk_idx))


X, IDS, WEIGHTS = torch.ones(2), torch.zeros(3), torch.zeros(4)


def begin(engine: Any, tag: int, max_tokens: Any = None) -> Tensor:
    return engine.dispatch_begin(X, IDS, WEIGHTS, tag, max_tokens)


def test_an_op_begins_with_its_arguments_and_ends_with_its_outputs() -> None:
    engine: Any = Engine()
    ticket = begin(engine, 7)
    assert (ticket.shape, ticket.dtype, ticket.device.type) == ((1,), torch.int32, "cpu")
    (begun,) = engine._begun
    assert (begun.op, begun.method, begun.args, begun.tag) == (Op.DISPATCH, "dispatch", "args 7", 7)
    assert begun.used[2] is None
    assert (str(begun), begun.ended, begun.captured, begun.error) == ("dispatch of layer tag 7", False, False, None)
    assert engine.dispatch_finish(ticket, "ignored") is engine.outputs
    assert engine.noted == [("first", 7), ("second", 7)]
    assert engine._begun == ()


def test_tensors_of_an_op_have_no_graph() -> None:
    """Nodes of autograd keep the engine, which keeps the op: nothing would collect such a circle."""
    engine: Any = Engine()
    x = (torch.ones(2, requires_grad=True) * 2).requires_grad_()
    engine.dispatch_begin(x, IDS, WEIGHTS, 7, None)
    (begun,) = engine._begun
    assert begun.given[0].grad_fn is None
    assert begun.given[0].data_ptr() == x.data_ptr()
    assert begun.given[3:] == (7, None)


@pytest.mark.parametrize("waited", [0, 1, 2])
def test_a_wait_ends_the_ops_before_it_and_itself(waited: int) -> None:
    engine: Any = Engine(depth=3)
    tickets = [begin(engine, tag) for tag in range(3)]
    engine.dispatch_finish(tickets[waited])
    assert engine.noted[3:] == [("second", tag) for tag in range(waited + 1)]
    for other in {0, 1, 2} - {waited}:
        engine.dispatch_finish(tickets[other])
    assert engine.noted[3:] == [("second", tag) for tag in range(3)], "each ends once, in order"


def test_an_ended_op_does_not_hide_those_after_it() -> None:
    engine: Any = Engine(depth=3)
    first, second = begin(engine, 0), begin(engine, 1)
    engine.dispatch_finish(second)  # which ends the first also
    third = begin(engine, 2)
    engine.dispatch_finish(third)
    engine.dispatch_finish(first)
    assert [tag for half, tag in engine.noted if half == "second"] == [0, 1, 2]


@pytest.mark.parametrize("method", OPS)
def test_halves_of_each_method(method: str) -> None:
    engine: Any = Engine()
    setattr(engine, method, lambda *given, start: start("args", 4, *given) or "outputs")
    ticket = getattr(engine, f"{method}_begin")(X)
    (begun,) = engine._begun
    assert (begun.op, begun.method, begun.tag) == (OPS[method], method, 4)
    assert getattr(engine, f"{method}_finish")(ticket) == "outputs"


def test_an_op_is_waited_for_once_and_by_its_own_method() -> None:
    engine: Any = Engine(depth=2)
    first, second = begin(engine, 7), engine.combine_begin(X, IDS, WEIGHTS, 8, None)
    engine.dispatch_finish(first)
    for ticket, left in ((first, "combine of layer tag 8"), (second, "combine of layer tag 8")):
        with pytest.raises(InvalidInput) as raised:
            engine.dispatch_finish(ticket)
        got = f"wait: got an op that was waited for already, or lost ({left} under way); expected one wait each"
        assert (raised.value.args[0], raised.value.rank) == (got, 3)
    engine.combine_finish(second)
    with pytest.raises(InvalidInput, match=r"\(none under way\)"):
        engine.combine_finish(second)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_ops_as_the_depth_may_be_under_way(depth: int) -> None:
    engine: Any = Engine(depth=depth)
    tickets = [begin(engine, tag) for tag in range(depth)]
    with pytest.raises(InvalidInput) as raised:
        begin(engine, 9)
    allowed = "" if depth == 1 else f": depth = {depth} ops may be under way"
    first = "got dispatch while dispatch of layer tag 0 was begun and not waited for"
    assert raised.value.args[0] == f"wait: {first}, expected its wait() first{allowed}"
    ended = [("second", tag) for tag in range(depth)]
    assert engine.noted[depth:] == [*ended, ("refused", Op.DISPATCH, 9)], "ops under way end first"
    assert [engine.dispatch_finish(ticket) for ticket in tickets] == [engine.outputs] * depth, "results are kept"
    begin(engine, 10)


def test_an_ended_op_is_forgotten_when_as_many_others_have_begun() -> None:
    engine: Any = Engine(depth=2)
    old = begin(engine, 0)
    engine._end_before(Op.COMBINE, 5)
    recent = [begin(engine, tag) for tag in (1, 2)]
    assert [b.tag for b in engine._begun] == [1, 2]
    with pytest.raises(InvalidInput, match="or lost"):
        engine.dispatch_finish(old)
    for ticket in recent:
        engine.dispatch_finish(ticket)


def test_a_whole_op_ends_those_under_way() -> None:
    engine: Any = Engine(depth=3)
    for tag in range(2):
        begin(engine, tag)
    engine._end_before(Op.COMBINE, 5)
    engine._end_before(Op.COMBINE, 6)
    assert engine.noted[2:] == [("second", 0), ("second", 1)]
    engine = Engine(depth=1)
    begin(engine, 0)
    with pytest.raises(InvalidInput, match="wait: got combine while dispatch of layer tag 0 was begun"):
        engine._end_before(Op.COMBINE, 5)


def test_a_window_needs_room_for_an_op() -> None:
    engine: Any = Engine(depth=2)
    begin(engine, 0)
    engine._require_place()
    begin(engine, 1)
    with pytest.raises(InvalidInput) as raised:
        engine._require_place()
    got = "token_window: got a call while dispatch of layer tag 0 is under way, expected its wait() first"
    assert raised.value.args[0] == f"{got}: depth = 2 ops may be under way"
    assert raised.value.rank == 3


def test_each_op_has_its_own_error() -> None:
    engine: Any = Engine(depth=2)
    first, second = begin(engine, 0), begin(engine, 1)
    engine.errors[0] = PeerTimeout("late")
    assert engine.dispatch_finish(second) is engine.outputs
    with pytest.raises(PeerTimeout, match="late") as raised:
        engine.dispatch_finish(first)
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "_run_second" not in frames, "frames of the other call would keep the engine"


def test_an_op_that_failed_under_another_call_ends_once() -> None:
    """Its second half ran in that call; its own wait only raises its error."""
    engine: Any = Engine(depth=2)
    first, second = begin(engine, 0), begin(engine, 1)
    engine.errors[0] = PeerTimeout("late")
    engine.dispatch_finish(second)
    engine.errors[0] = ConcurrentUse("no op is under way")  # as an engine would say of a second time
    with pytest.raises(PeerTimeout, match="late"):
        engine.dispatch_finish(first)


def test_another_thread_that_waits_is_reported_to_this_one_only() -> None:
    engine: Any = Engine()
    ticket = begin(engine, 0)
    engine.errors[0] = ConcurrentUse("another thread")
    with pytest.raises(ConcurrentUse):
        engine.dispatch_finish(ticket)
    engine.errors.clear()
    assert engine.dispatch_finish(ticket) is engine.outputs, "the op is still under way"


@pytest.mark.parametrize(("max_tokens", "most"), [(None, 12), (5, 5)])
def test_a_dispatch_that_overflows_is_repeated_with_rows_of_its_own(max_tokens: Any, most: int) -> None:
    engine: Any = Engine(grows=True)
    ticket = begin(engine, 0, max_tokens)
    engine.errors[0] = CapacityOverflow("too many")
    assert engine.dispatch_finish(ticket) == "repeated"
    assert engine.noted[2] == ("grow", most)
    name, tag, x, bound = engine.noted[3]
    assert (name, tag, bound) == ("whole", 0, max_tokens)
    assert torch.equal(x, X)
    assert x.data_ptr() != X.data_ptr(), "a window is by now a later op's"


@pytest.mark.parametrize("scaled", [False, True])
def test_advice_on_an_overflow_looks_at_the_routing(scaled: bool) -> None:
    engine: Any = Engine()
    error = CapacityOverflow("too many")
    engine.errors[0] = error
    if scaled:
        ticket, finish = engine.dispatch_scaled_begin(X, None, IDS, WEIGHTS, 0, None), engine.dispatch_scaled_finish
    else:
        ticket, finish = begin(engine, 0), engine.dispatch_finish
    with pytest.raises(CapacityOverflow) as raised:
        finish(ticket)
    assert raised.value is error
    assert engine.noted[-1][:2] == ("advise", error)
    assert engine.noted[-1][2].data_ptr() == IDS.data_ptr()


def test_an_op_keeps_its_tensors_until_it_is_waited_for() -> None:
    engine: Any = Engine()
    x = torch.ones(2)
    kept = weakref.ref(x.untyped_storage())
    ticket = engine.dispatch_begin(x, IDS, WEIGHTS, 0, None)
    del x
    gc.collect()
    assert kept() is not None or engine._begun[0].given[0].sum() == 2
    engine.dispatch_finish(ticket)
    assert engine._begun == ()
