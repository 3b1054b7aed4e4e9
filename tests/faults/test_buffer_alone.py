"""A buffer, its handle and halves of packed ops on a stand-in of the engine: options, tags, ends, views of plans."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.routing import make_spec

from moe_rt import Buffer, ThreadGroup, Tuning, _engine
from moe_rt.buffer import buffer as buffer_module
from moe_rt.buffer import packed
from moe_rt.buffer.handle import Handle
from moe_rt.config.options import BufferOptions
from moe_rt.errors import GroupPoisoned, InvalidConfig, InvalidInput, Op


class Engine:
    """Notes the calls that a buffer makes."""

    def __init__(self, noted: list[Any], fails: bool = False) -> None:
        self.noted, self.fails = noted, fails
        self.device, self.capacity, self.shape = torch.device("cpu"), 36, SimpleNamespace(segment_bytes=lambda: 4096)

    def poison(self, error: Any) -> None:
        self.noted.append(("poison", error))
        if self.fails:
            raise RuntimeError("poison fails")

    def __getattr__(self, name: str) -> Any:
        def note(*given: Any, **named: Any) -> Any:
            self.noted.append((name, *given, *([named] if named else [])))
            return f"what {name} returns"

        return note


SIZES = dict(num_max_tokens_per_rank=12, hidden=20, num_topk=3, num_experts=9, dtype=torch.float32)


@pytest.fixture
def noted() -> list[Any]:
    return []


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, noted: list[Any]) -> list[Any]:
    """Return what `open_engine` is called with."""
    calls: list[Any] = []

    def open_engine(rendezvous: Any, options: BufferOptions, sizes: dict[str, Any]) -> Any:
        calls.append((rendezvous, options, sizes))
        changes = {"layout": sizes["layout"], "expert_alignment": sizes["expert_alignment"]}
        return make_spec(2, **changes), "threads", Engine(noted)

    monkeypatch.setattr(buffer_module, "open_engine", open_engine)
    monkeypatch.setattr(buffer_module, "leave", lambda engine: noted.append("left"))
    return calls


def group() -> ThreadGroup:
    return ThreadGroup.make(2)[1]


@pytest.mark.parametrize(
    "rows", [dict(layout="tokens", expert_alignment=1), dict(layout="experts", expert_alignment=16)]
)
def test_every_option_reaches_the_engine(opened: list[Any], rows: dict[str, Any]) -> None:
    options: dict[str, Any] = dict(
        heap="threads", capacity_factor=1.25, overflow="drop", dispatch_dtype=torch.int8,
        combine_dtype=torch.float8_e4m3fn, route="flat", sums="invariant", depth=3, timeout_s=4.5, init_timeout_s=6.5,
        placement=[0] * 5 + [1] * 4, num_threads=7, num_sms=8, tuning=Tuning(threads=256),
    )  # fmt: skip
    assert set(options) == {field.name for field in fields(BufferOptions)}
    of = group()
    buffer = Buffer(of, **SIZES, **rows, **options)
    ((rendezvous, given, sizes),) = opened
    assert rendezvous is of
    assert {name: getattr(given, name) for name in options} == options
    assert sizes == {**SIZES, **rows}
    assert (buffer.rank, buffer.num_ranks, buffer.process_group, buffer.heap) == (1, 2, None, "threads")


def test_options_that_are_not_given_are_the_documented_ones(opened: list[Any]) -> None:
    Buffer(group(), **SIZES)
    ((_, given, sizes),) = opened
    assert given == BufferOptions()
    assert sizes == {**SIZES, "layout": "experts", "expert_alignment": 1}
    documented = (given.depth, given.timeout_s, given.init_timeout_s, given.num_threads, given.num_sms)
    assert documented == (1, 120.0, 300.0, 1, None)


def test_facts_of_a_buffer(opened: list[Any]) -> None:
    buffer = Buffer(group(), **SIZES)
    assert (buffer.device, buffer.capacity, buffer.num_bytes) == (torch.device("cpu"), 36, 4096)
    assert (buffer.num_local_experts, buffer.topology, buffer.route) == (4, buffer.spec.topology, "flat")
    assert repr(buffer) == f"Buffer(rank 1 of 2, heap=threads, 4096 bytes, {buffer.spec})"
    buffer.spec = replace(buffer.spec, route="two_level")
    assert buffer.route == "two_level"


def test_what_a_buffer_asks_its_engine(opened: list[Any], noted: list[Any]) -> None:
    buffer = Buffer(group(), **SIZES)
    assert buffer.timings() == "what timings returns"
    assert buffer.waited_ns() == "what waited_ns returns"
    assert buffer.report() == "what report returns"
    buffer.check()
    error = InvalidInput("x")
    for named in ({}, {"tag": 5}):
        buffer.refuse(error, **named)
    refused = [("_refuse", Op.DISPATCH, tag, error, 0, 0) for tag in (0, 5)]
    assert noted == [("timings",), ("waited_ns",), ("report",), ("health",), *refused]


def test_tags_of_layers(opened: list[Any]) -> None:
    buffer = Buffer(group(), **SIZES)
    assert [buffer.new_tag(), buffer.new_tag()] == [1, 2]
    for reserved, expected in ((1, 3), (3, 4), (9, 10), (5, 11)):
        buffer.reserve_tags(reserved)
        assert buffer.new_tag() == expected


def test_a_buffer_is_closed_once(opened: list[Any], noted: list[Any]) -> None:
    buffer = Buffer(group(), **SIZES)
    assert not buffer.closed
    for _ in range(2):
        buffer.close()
        assert buffer.closed
    buffer.abort(ValueError("late"))
    del buffer
    gc.collect()
    assert noted == [("close",)]


def test_a_buffer_that_is_garbage_is_left(opened: list[Any], noted: list[Any]) -> None:
    buffer = Buffer(group(), **SIZES)
    del buffer
    gc.collect()
    assert noted == ["left"]


@pytest.mark.parametrize("given", [True, False])
def test_an_abort_has_a_cause(opened: list[Any], noted: list[Any], given: bool) -> None:
    buffer, handled = Buffer(group(), **SIZES), KeyError("handled")
    named = ValueError("named")
    try:
        raise handled
    except KeyError:
        buffer.abort(named if given else None)
    assert noted == [("poison", named if given else handled), ("close",)]
    other = Buffer(group(), **SIZES)
    other.abort()
    assert noted[2:] == [("poison", None), ("close",)], "no exception is handled"


def test_a_buffer_is_closed_although_its_peers_cannot_be_told(opened: list[Any], noted: list[Any]) -> None:
    buffer = Buffer(group(), **SIZES)
    buffer._engine.fails = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="poison fails"):
        buffer.abort(ValueError("x"))
    assert buffer.closed
    assert noted[-1] == ("close",)


@pytest.mark.parametrize("first", [None, GroupPoisoned("peer")])
def test_a_rank_that_leaves_by_an_exception(
    opened: list[Any], noted: list[Any], monkeypatch: pytest.MonkeyPatch, first: Any
) -> None:
    """A peer's failure is looked for before this rank ends the group itself."""
    monkeypatch.setattr(buffer_module, "first_failure", lambda engine, error: noted.append("looked") or first)
    error = RuntimeError("connection closed")
    with pytest.raises(RuntimeError) as raised, Buffer(group(), **SIZES) as buffer:
        raise error
    assert raised.value is (first or error)
    if first:
        assert raised.value.__cause__ is error
    assert noted == ["looked", ("poison", error), ("close",)]
    assert buffer.closed
    noted.clear()
    with Buffer(group(), **SIZES) as buffer:
        pass
    assert noted == [("close",)]


def test_a_buffer_is_neither_copied_nor_pickled(opened: list[Any]) -> None:
    buffer = Buffer(group(), **SIZES)
    assert copy.deepcopy(buffer) is buffer
    with pytest.raises(InvalidConfig, match=r"^pickle: got a Buffer, memory that a group shares; expected it"):
        pickle.dumps(buffer)


@pytest.mark.parametrize(
    ("layout", "alignment", "view"), [("experts", 1, ""), ("experts", 8, "ends"), ("tokens", 1, "ids")]
)
def test_views_of_a_plan(opened: list[Any], layout: Any, alignment: int, view: str) -> None:
    buffer = Buffer(group(), **SIZES, layout=layout, expert_alignment=alignment)
    buffer._engine.ids_at = 5
    plan, weights = torch.arange(200, dtype=torch.int32), torch.zeros(6, 3)
    outputs = torch.zeros(1), weights, torch.zeros(4, dtype=torch.int32), plan, torch.zeros(2, 3, dtype=torch.int32)
    _, found_weights, handle = buffer._received(7, outputs)
    assert found_weights is weights
    assert (handle.tag, handle.recv_plan is plan, handle.offs is outputs[2], handle.send_plan is outputs[4]) == (
        7, True, True, True,
    )  # fmt: skip
    assert (handle.recv_topk_idx is not None, handle.real_ends is not None) == (view == "ids", view == "ends")
    if handle.recv_topk_idx is not None:
        assert torch.equal(handle.recv_topk_idx, torch.arange(5, 23, dtype=torch.int32).view(6, 3))
        assert handle.recv_topk_idx.data_ptr() == plan[5:].data_ptr(), "it is no copy"
    if handle.real_ends is not None:
        assert handle.real_ends.tolist() == [5, 6, 7, 8]


def handle_of(offs: list[int], ends: list[int] | None = None, ids: Any = None) -> Handle:
    plan = torch.arange(100, dtype=torch.int32)
    real = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    return Handle(offs=torch.tensor(offs, dtype=torch.int32), recv_plan=plan, send_plan=plan[:6].view(2, 3), tag=4,
                  recv_topk_idx=ids, real_ends=real)  # fmt: skip


PLACES = [
    ([0], None),
    ([3], None),
    ([2, 2, 5], None),
    ([0, 0, 0], None),
    ([8, 8, 16], [5, 8, 9]),
    ([8, 16, 16], [0, 16, 16]),
]


@pytest.mark.parametrize(("offs", "ends"), PLACES)
def test_experts_of_rows(offs: list[int], ends: list[int] | None) -> None:
    handle = handle_of(offs, ends)
    starts, last = [0, *offs[:-1]], ends or offs
    for num_rows in (0, 1, offs[-1], offs[-1] + 3):
        expected = [next((e for e in range(len(offs)) if starts[e] <= row < last[e]), -1) for row in range(num_rows)]
        found = handle.row_experts(num_rows)
        assert (found.dtype, found.tolist()) == (torch.int32, expected)
    assert handle.ends.tolist() == last
    assert handle.num_recv_tokens_per_expert.tolist() == [end - start for start, end in zip(starts, last, strict=True)]


def test_words_of_a_plan() -> None:
    handle = handle_of([3], ids=torch.zeros(4, 3, dtype=torch.int32))
    assert handle.source_tokens.tolist() == [12, 16, 20, 24], "after a head of 12 words, one of four each"
    assert int(handle.num_dropped) == _engine.RecvPlan.num_dropped == 7


def test_rows_of_the_other_layout_are_refused() -> None:
    tokens, experts = handle_of([3], ids=torch.zeros(4, 3)), handle_of([3])
    got = 'got rows of tokens (layout="tokens"), expected recv_topk_idx, which has the experts of each row'
    for name, call in (("row_experts", lambda: tokens.row_experts(3)),
                       ("num_recv_tokens_per_expert", lambda: tokens.num_recv_tokens_per_expert)):  # fmt: skip
        with pytest.raises(InvalidConfig) as raised:
            call()
        assert raised.value.args[0] == f"handle.{name}: {got}"
    with pytest.raises(InvalidConfig) as raised:
        _ = experts.source_tokens
    got = 'got rows of experts (layout="experts"), expected layout="tokens", whose rows are tokens'
    assert raised.value.args[0] == f"handle.source_tokens: {got}"


def test_a_handle_is_shown_by_its_shapes() -> None:
    assert repr(handle_of([3, 4])) == "Handle(tag=4, offs=[2], recv_plan=[100], send_plan=[2, 3], device='cpu')"
    shown = repr(handle_of([3], [2], torch.zeros(4, 3)))
    assert "recv_topk_idx=[4, 3], real_ends=[1], device='cpu'" in shown


class PackedEngine:
    """Notes ops, whole or begun, and returns numbered outputs."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.spec = make_spec(2)
        self.outputs = tuple(torch.full((1,), float(n)) for n in range(6))

    def dispatch(self, *given: Any, **options: Any) -> Any:
        self.noted.append(("dispatch", given, options))
        return self.outputs

    def combine(self, *given: Any, **options: Any) -> Any:
        self.noted.append(("combine", given, options))
        return self.outputs[0]

    def under_way(self, op: Op, method: str, *given: Any, **options: Any) -> Any:
        self.noted.append((op, method, given, options))
        outputs = self.outputs if op is Op.DISPATCH else self.outputs[0]
        return SimpleNamespace(outputs=outputs, ticket="the ticket")

    def finish(self, *given: Any) -> None:
        self.noted.append(("finish", *given))


@pytest.mark.parametrize(("wait", "scaled"), list(itertools.product([True, False], repeat=2)))
def test_a_packed_dispatch(wait: bool, scaled: bool) -> None:
    engine = PackedEngine()
    buffer: Any = SimpleNamespace(_engine=engine)
    x, ids, weights, scales = (torch.zeros(n) for n in (1, 2, 3, 4))
    half = packed.dispatch(buffer, (x, scales) if scaled else x, ids, weights, 6, wait=wait)
    options = {"scaled": scaled, "scales": scales if scaled else None, "expert_rows": 12}
    ((*name, given, named),) = engine.noted
    assert name == (["dispatch"] if wait else [Op.DISPATCH, "dispatch"])
    assert ([id(t) for t in given[:3]], given[3:], named) == ([id(x), id(ids), id(weights)], (0, 6), options)
    assert half.outputs is engine.outputs
    assert half.handle is not None
    plans = half.handle.offs, half.handle.recv_plan, half.handle.send_plan
    assert [int(t) for t in plans] == [2, 3, 4]
    assert half.handle.tag == 0
    for _ in range(2):
        half.finish()
    assert engine.noted[1:] == ([] if wait else [("finish", "dispatch", "the ticket")]), "once"


@pytest.mark.parametrize(("wait", "into"), list(itertools.product([True, False], repeat=2)))
def test_a_packed_combine(wait: bool, into: bool) -> None:
    engine = PackedEngine()
    buffer: Any = SimpleNamespace(_engine=engine)
    y, weights, out = torch.zeros(1), torch.ones(2, 3), torch.zeros(5) if into else None
    handle = handle_of([3])
    half = packed.combine(buffer, y, handle, weights, out, wait=wait)
    ((*name, given, named),) = engine.noted
    assert name == (["combine"] if wait else [Op.COMBINE, "combine"])
    plans = y, None, handle.recv_plan, handle.send_plan, 0, out
    assert [id(each) for each in given] == [id(each) for each in plans]
    assert torch.equal(named["topk_weights"], weights)
    assert (named["topk_weights"] is weights) is wait, "the caller may change its own before the second half"
    assert half.outputs is (out if into and not wait else engine.outputs[0])
    assert half.handle is None
    half.finish()
    assert engine.noted[1:] == ([] if wait else [("finish", "combine", "the ticket")])


def test_entries_that_a_combine_leaves_out() -> None:
    handle = handle_of([3])
    left = packed.without_entries(handle, torch.tensor([[True, False, False], [False, False, True]]))
    assert left.send_plan.tolist() == [[-1, 1, 2], [3, 4, -1]]
    assert (left.offs is handle.offs, left.recv_plan is handle.recv_plan, left.tag) == (True, True, 4)
    assert handle.send_plan.tolist() == [[0, 1, 2], [3, 4, 5]], "the own handle stays"
