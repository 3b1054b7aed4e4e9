"""Experts that a wrapper would average are found in the graph of combine's input, once for each buffer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rt.buffer import replicas
from moe_rt.buffer.replicas import leaves, refuse_replicated_experts
from moe_rt.errors import InvalidConfig


class Buffer:
    def __init__(self, num_ranks: int = 2) -> None:
        self.num_ranks = num_ranks


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return wrap(*parameters), after which a wrapper's forward is running that averages these parameters."""
    module: Any = ModuleType("torch.nn.parallel.distributed")
    module.DistributedDataParallel = SimpleNamespace(_active_ddp_module=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def wrapping(*parameters: Tensor) -> None:
        module.DistributedDataParallel._active_ddp_module = SimpleNamespace(_module_parameters=list(parameters))

    return wrapping


def weight(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def test_experts_among_averaged_parameters_are_refused_with_their_shape(wrap: Any) -> None:
    router, experts = weight(2, 4), weight(4, 5)
    y = torch.ones(3, 4) @ experts
    wrap(router)
    refuse_replicated_experts(Buffer(), y)
    wrap(router, experts)
    with pytest.raises(InvalidConfig) as raised:
        refuse_replicated_experts(Buffer(), y)
    assert raised.value.args[0] == (
        "DistributedDataParallel: got experts' weights [4, 5] among its parameters, which it takes for copies of one "
        "another; expected moe_rt.parallel.own_experts(module, buffer), then prepare(model)"
    )


def test_a_buffer_that_was_used_before_there_was_a_wrapper_is_checked(wrap: Any) -> None:
    experts = weight(4, 5)
    y, buffer = torch.ones(3, 4) @ experts, Buffer()
    refuse_replicated_experts(buffer, y)
    wrap(experts)
    with pytest.raises(InvalidConfig):
        refuse_replicated_experts(buffer, y)


@pytest.mark.parametrize("averaged", range(3))
def test_one_averaged_weight_of_several_is_refused(wrap: Any, averaged: int) -> None:
    weights = [weight(4, 4) for _ in range(3)]
    wrap(weights[averaged])
    with pytest.raises(InvalidConfig):
        refuse_replicated_experts(Buffer(), torch.ones(3, 4) @ weights[0] @ weights[1] @ weights[2])


def test_the_first_call_of_a_buffer_inside_a_wrapper_is_checked(wrap: Any) -> None:
    experts = weight(4, 5)
    y, buffer = torch.ones(3, 4) @ experts, Buffer()
    refuse_replicated_experts(buffer, y)  # outside
    wrap()
    refuse_replicated_experts(buffer, y)
    wrap(experts)
    refuse_replicated_experts(buffer, y)  # checked already
    with pytest.raises(InvalidConfig):
        refuse_replicated_experts(Buffer(), y)


@pytest.mark.parametrize("case", ["one rank", "no tensor", "no gradient", "compiling", "no wrapper loaded"])
def test_calls_that_need_no_check(wrap: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    experts = weight(4, 5)
    y: Any = torch.ones(3, 4) @ experts
    buffer = Buffer(1 if case == "one rank" else 2)
    wrap(experts)
    if case == "no tensor":
        y = [y]
    elif case == "no gradient":
        y = y.detach()
    elif case == "compiling":
        monkeypatch.setattr(replicas, "is_compiling", lambda: True)
    elif case == "no wrapper loaded":
        monkeypatch.delitem(sys.modules, "torch.nn.parallel.distributed")
    refuse_replicated_experts(buffer, y)


class DispatchOfTokens(torch.autograd.Function):
    """A node like that of a dispatch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def found(t: Tensor, *ends: str) -> set[int]:
    each = [id(leaf) for leaf in leaves(t.grad_fn, *ends)]
    assert len(each) == len(set(each)), "each leaf once"
    return set(each)


def test_leaves_of_a_graph_back_to_the_dispatch() -> None:
    router, first, second = weight(3), weight(3), weight(3)
    rows = DispatchOfTokens.apply(router * 2)
    hidden = rows * first
    y = (hidden + hidden * second) * first.exp()
    assert found(y) == {id(first), id(second)}, "the dispatch ends the search, shared nodes are seen once"
    assert found(y, "ExpBackward0", "AddBackward0") == set()
    assert found(first.exp() * second, "ExpBackward0") == {id(second)}
    assert found(torch.ones(3) * 2) == set()
