"""A contestant with one kind of wrong output fails the check of its op, in a whole measurement of a single rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.wrong_outputs import ROTATIONS, Spoil, case_of, nan, one_bit, one_token, one_zero
from torch import Tensor, nn

from moe_rt.lab.bench.contestants.base import Delivery
from moe_rt.lab.bench.contestants.permuted import Permuted
from moe_rt.lab.bench.expect import Expectation
from moe_rt.lab.bench.inputs import make_inputs
from moe_rt.lab.bench.measure import measure
from moe_rt.lab.bench.world import Processor, World
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.router import Router

two_dtypes = pytest.mark.parametrize("dtype", ["bf16", "fp64"])


@pytest.fixture(autouse=True)
def _no_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable garbage collection, which takes most of the time of a short measurement."""
    monkeypatch.setattr("gc.collect", int)


class Alone(Permuted):
    """The exchange of a single rank, which receives what it sends. Any tensor on the way can be spoiled."""

    name = "alone"
    place, spoil = "", staticmethod(one_token)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        return counts

    def exchange_rows(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        return rows

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        x = _SpoilGradient.apply(x, self._at("grad_x"))
        topk_weights = _SpoilGradient.apply(topk_weights, self._at("grad_weights"))
        delivery = super().dispatch(x, topk_idx, topk_weights)
        delivery.rows = self._at("rows")(delivery.rows)
        return delivery

    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        out = super().combine(y, delivery)
        return out + (self._at("out")(out) - out).detach()

    def layer(self, router: Router, experts: SwiGLUExperts) -> nn.Module:
        router.weight.register_hook(self._at("router.grad"))
        return super().layer(router, experts)

    def _at(self, place: str) -> Spoil:
        return self.spoil if place == self.place else _as_it_is


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, spoil: Spoil) -> Tensor:
        ctx.spoil = spoil
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.spoil(grads[0]), None


class OfTheCallBefore:
    """Spoils a tensor by returning that of the previous call."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        before, self._last = self._last, tensor.detach().clone()
        return tensor if before is None or before.shape != tensor.shape else before


class OfTheFirstCall(OfTheCallBefore):
    def __call__(self, tensor: Tensor) -> Tensor:
        self._last = tensor.detach().clone() if self._last is None else self._last
        return self._last


def errors_of(op: Any, dtype: str, place: str, spoil: Any, iters: int = 3) -> list[str]:
    """Return the errors of each phase's check, as in a run of the benchmark."""
    case = case_of(1, dtype, op=op)
    stands_in: Any = SimpleNamespace(all_gather=lambda text, timeout_s: [text], wait=int)
    group: Any = None
    world = World(0, 1, group, stands_in, stands_in, Processor("cpu"), mpi=False)
    contestant = Alone(case, world)
    contestant.place, contestant.spoil = place, spoil
    inputs = [make_inputs(case, 0, 0, i) for i in range(ROTATIONS)]
    with torch.no_grad():
        steps = contestant.steps(inputs, Expectation(case, 0, 0, ROTATIONS))
    return [" ".join(times.errors) for times in measure(world, steps, iters, 1, False, lambda part: None)]


@two_dtypes
@pytest.mark.parametrize("op", ["dispatch", "combine", "pair", "layer"])
def test_an_honest_contestant_passes(op: str, dtype: str) -> None:
    assert not any(errors_of(op, dtype, "", nan))


@two_dtypes
@pytest.mark.parametrize("spoil", [nan, one_token, one_zero, OfTheCallBefore, OfTheFirstCall], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    ("op", "place"), [("dispatch", "rows"), ("pair", "rows"), ("pair", "out"), ("combine", "out"), ("layer", "out")]
)
def test_a_contestant_that_cheats_is_caught(op: str, place: str, spoil: Any, dtype: str) -> None:
    """The op's check catches the cheat in each phase. Eight iterations end in a turn of two, as many as there are
    inputs."""
    found = errors_of(op, dtype, place, spoil() if isinstance(spoil, type) else spoil, iters=8)
    assert all(found), found


@two_dtypes
@pytest.mark.parametrize("op", ["dispatch", "pair"])
def test_one_wrong_bit_of_a_row_is_caught(op: str, dtype: str) -> None:
    """One wrong bit of a row is caught, although combine's result is within its rounding."""
    assert all(errors_of(op, dtype, "rows", one_bit))


@two_dtypes
@pytest.mark.parametrize("spoil", [nan, one_token, one_zero, OfTheCallBefore], ids=lambda s: s.__name__)
@pytest.mark.parametrize("place", ["grad_x", "grad_weights", "router.grad"])
def test_a_layer_whose_gradients_are_wrong_is_caught(place: str, spoil: Any, dtype: str) -> None:
    """Wrong gradients of one token, of expert weights or of the router are caught, by the backward's check only."""
    forward, backward = errors_of("layer", dtype, place, spoil() if isinstance(spoil, type) else spoil)
    assert forward == ""
    assert "grad" in backward
