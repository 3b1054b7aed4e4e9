"""Interface of a contestant: it provides steps whose output can be checked. Most contestants are an Exchange.

In the layer op all contestants get the same weights and moe_rt's own router and experts, so only the exchange differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.crossing import Unit
from moe_rt.lab.bench.expect import Expectation, make_experts, make_grad_out, make_router
from moe_rt.lab.bench.inputs import Inputs
from moe_rt.lab.bench.world import World
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.router import Router


class Unavailable(Exception):
    """Raised if a contestant cannot run here; the message says why, and what to install if that helps."""


@dataclass(frozen=True)
class Step:
    """One op of one contestant. It runs without gradients unless it enables them itself.

    Attributes:
        run: runs the op on input number `i` (modulo the number of inputs) and returns its output; this is timed.
        check: raises WrongOutput unless the output of `run(i)` is right.
        phase: name of this part of a case with several parts: "forward", "forward+backward".
    """

    run: Callable[[int], Any]
    check: Callable[[int, Any], None]
    phase: str = ""


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


class ExchangeLayer(nn.Module):
    """The equivalent of moe_rt.MoELayer around any exchange."""

    def __init__(self, exchange: Exchange, router: Router, experts: SwiGLUExperts) -> None:
        super().__init__()
        self.exchange, self.router, self.experts = exchange, router, experts

    def forward(self, x: Tensor) -> Tensor:
        topk_idx, topk_weights, _ = self.router(x)
        delivery = self.exchange.dispatch(x, topk_idx, topk_weights)
        return self.exchange.combine(self.experts(delivery.rows, delivery.offs), delivery)


def layer_steps(exchange: Exchange, inputs: Sequence[Inputs], expect: Expectation) -> list[Step]:
    """Steps of the layer op: forward, and forward with backward."""
    case, rank = exchange.case, exchange.world.rank
    first = sum(case.local_experts[:rank])
    device = exchange.world.processor.device
    router = make_router(case).to(device)
    experts = make_experts(case, range(first, first + case.local_experts[rank]), case.torch_dtype).to(device)
    layer = exchange.layer(router, experts)
    xs = [tokens.x.requires_grad_() for tokens in inputs]
    grad_out = make_grad_out(case, rank).to(device)

    def forward(i: int) -> dict[str, Tensor | None]:
        return {"out": layer(xs[i % len(xs)])}

    def forward_backward(i: int) -> dict[str, Tensor | None]:
        x = xs[i % len(xs)]
        x.grad = None
        layer.zero_grad()
        with torch.enable_grad():
            out = layer(x)
            out.backward(grad_out)
        return {"out": out.detach(), "grad_x": x.grad, "router.grad": router.weight.grad}

    return [Step(forward, expect.layer, "forward"), Step(forward_backward, expect.layer, "forward+backward")]
