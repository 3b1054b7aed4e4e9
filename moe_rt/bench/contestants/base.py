"""Interface of a contestant: it provides steps whose output can be checked. Most contestants are an Exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_rt.bench.cases import Case
from moe_rt.bench.crossing import Unit
from moe_rt.bench.expect import Expectation
from moe_rt.bench.inputs import Inputs
from moe_rt.bench.layers import ExchangeLayer, layer_steps
from moe_rt.bench.step import Step, Unavailable
from moe_rt.bench.world import World
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.router import Router


class Contestant(ABC):
    """Created once per case, on every rank. `name` is shown in tables.

    Attributes:
        unit: a token's row crosses the network once per distinct unit; None if unknown.
    """

    name: ClassVar[str]
    unit: Unit | None = None

    def __init__(self, case: Case, world: World) -> None:
        """Collective. Raises Unavailable, identically on all ranks, if it cannot run."""
        self.case, self.world = case, world

    @abstractmethod
    def steps(self, inputs: Sequence[Inputs], expect: Expectation) -> list[Step]:
        """Return the steps to time for the case's op. Collective: may communicate to prepare itself."""

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Free the contestant's resources."""


def require_processes(case: Case) -> None:
    """Raise Unavailable if ranks are threads."""
    if not case.as_processes:
        raise Unavailable("torch.distributed needs ranks that are processes: --heap shm, ucx, nvshmem or gin")


@dataclass
class Delivery:
    """Result of dispatch on this rank.

    Attributes:
        rows: [n or more, H], of which the first n count.
        offs: int32 [L], inclusive ends of each local expert's rows.
        state: what `combine` needs to return the rows.
    """

    rows: Tensor
    offs: Tensor
    state: Any


class Exchange(Contestant):
    """A contestant that sends tokens to experts and back, differentiably if gradients are on."""

    @abstractmethod
    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        """Send every token to the ranks of its experts. Collective."""

    @abstractmethod
    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        """y as `delivery.rows` -> [T, H], the weighted sum over each token's experts. Collective."""

    def experts_of(self, delivery: Delivery) -> Tensor:
        """int64 [n], the local expert of every row. Override it if rows are not in the order of experts."""
        per_expert = delivery.offs.diff(prepend=delivery.offs.new_zeros(1))
        return torch.repeat_interleave(torch.arange(len(per_expert), device=per_expert.device), per_expert)

    def layer(self, router: Router, experts: SwiGLUExperts) -> nn.Module:
        """Return a whole layer around this exchange: x [T, H] -> [T, H]."""
        return ExchangeLayer(self, router, experts)

    def steps(self, inputs: Sequence[Inputs], expect: Expectation) -> list[Step]:
        if self.case.op == "layer":
            return layer_steps(self, inputs, expect)
        make = {"dispatch": self._dispatch_step, "combine": self._combine_step, "pair": self._pair_step}
        return [make[self.case.op](inputs, expect)]

    def _check_rows(self, expect: Expectation, i: int, delivery: Delivery) -> None:
        experts = self.experts_of(delivery)
        expect.rows(i, delivery.rows[: len(experts)], experts)

    def _dispatch_step(self, inputs: Sequence[Inputs], expect: Expectation) -> Step:
        def run(i: int) -> Delivery:
            tokens = inputs[i % len(inputs)]
            return self.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)

        return Step(run, lambda i, delivery: self._check_rows(expect, i, delivery))

    def _pair_step(self, inputs: Sequence[Inputs], expect: Expectation) -> Step:
        def run(i: int) -> tuple[Delivery, Tensor]:
            tokens = inputs[i % len(inputs)]
            delivery = self.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
            return delivery, self.combine(delivery.rows, delivery)

        def check(i: int, output: tuple[Delivery, Tensor]) -> None:
            self._check_rows(expect, i, output[0])
            expect.combined(i, output[1], scaled=False)

        return Step(run, check)

    def _combine_step(self, inputs: Sequence[Inputs], expect: Expectation) -> Step:
        """Time combine on rows that each expert has scaled by a distinct factor, so that a row of the wrong expert
        shows."""
        deliveries, ys = [], []
        for tokens in inputs:
            delivery = self.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
            experts = self.experts_of(delivery)
            y = torch.empty_like(delivery.rows)
            y[: len(experts)] = expect.scale(delivery.rows[: len(experts)], experts)
            delivery.rows = y[:0]
            deliveries.append(delivery)
            ys.append(y)

        def run(i: int) -> Tensor:
            return self.combine(ys[i % len(ys)], deliveries[i % len(ys)])

        return Step(run, lambda i, out: expect.combined(i, out, scaled=True))
