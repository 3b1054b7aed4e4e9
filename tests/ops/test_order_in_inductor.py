"""Inductor keeps every op, in program order: what is registered with it, and what its scheduler is given."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch._inductor.virtualized import V

from moe_rt.ops import compile as order


class Operation:
    def __init__(self, name: str) -> None:
        self.name, self.has_side_effects = name, lambda: False

    def get_operation_name(self) -> str:
        return f"operation {self.name}"

    def get_name(self) -> str:
        return self.name


class Graph:
    """The part of Inductor's graph that lowering an op writes."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.additional_buffer_deps: dict[str, set[str]] = defaultdict(set)

    def lower(self, *names: str) -> str:
        self.operations += [Operation(name) for name in names]
        return f"result of {names[0]}"


@pytest.fixture
def lowering(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in for Inductor's table of lowerings, and what was registered."""
    calls: list[tuple[Any, ...]] = []
    lowerings: dict[Any, Callable[..., Any]] = {}

    def make_fallback(op: Any, layout_constraint: Any, warn: bool) -> None:
        calls.append((op, layout_constraint, warn))
        lowerings[op] = lambda *args, **kwargs: (op, args, kwargs)

    module: Any = ModuleType("torch._inductor.lowering")
    module.get_layout_constraint_tag = lambda op, with_default: (op, with_default)
    module.tag_to_layout_constraint = lambda tag: ("constraint", tag)
    module.make_fallback, module.lowerings, module.calls = make_fallback, lowerings, calls
    monkeypatch.setitem(sys.modules, "torch._inductor.lowering", module)
    monkeypatch.setattr(order, "_kept", set())
    return module


def test_ops_are_registered_once_and_only_if_inductor_compiles(lowering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that never compiles does not import Inductor."""
    ops: list[Any] = ["one", "two"]
    traced = order.kept_in_order(ops, lambda *args, **kwargs: (args, kwargs))
    monkeypatch.delitem(sys.modules, "torch._inductor.lowering")
    assert traced(1, b=2) == ((1,), {"b": 2})
    assert lowering.calls == []
    monkeypatch.setitem(sys.modules, "torch._inductor.lowering", lowering)
    for _ in range(2):
        assert traced(3) == ((3,), {})
        assert lowering.calls == [(op, ("constraint", (op, True)), False) for op in ("one", "two")]
    ops.append("three")
    traced()
    assert [op for op, *_ in lowering.calls] == ["one", "two", "one", "two", "three"]


def test_each_op_follows_the_one_before() -> None:
    """The op and its outputs depend on the last output of the op before, and have side effects."""
    graph, other = Graph(), Graph()
    order._latest.pop(graph, None)
    lower = order._after_previous_op(lambda *names, graph: graph.lower(*names))

    def run(graph: Any, *names: str) -> Any:
        with V.set_graph_handler(graph):
            return lower(*names, graph=graph)

    graph.lower("plain")
    assert run(graph, "first") == "result of first"
    assert graph.additional_buffer_deps == {}
    graph.lower("between")
    run(graph, "second", "its output")
    run(other, "elsewhere")
    run(graph, "third")
    assert graph.additional_buffer_deps == {
        "operation second": {"first"},
        "operation its output": {"first"},
        "operation third": {"its output"},
    }
    assert other.additional_buffer_deps == {}
    effects = {operation.name: operation.has_side_effects() for operation in graph.operations}
    assert effects == {
        "plain": False,
        "first": True,
        "between": False,
        "second": True,
        "its output": True,
        "third": True,
    }


def test_a_fallback_is_lowered_in_order(lowering: Any) -> None:
    graph = Graph()
    order._keep_in_order(["an op"])  # type: ignore[list-item]
    graph.lower("before")
    with V.set_graph_handler(graph):  # type: ignore[arg-type]
        assert lowering.lowerings["an op"](1, b=2) == ("an op", (1,), {"b": 2})
    assert order._kept == {"an op"}
