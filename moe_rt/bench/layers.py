"""The layer op: router, dispatch, experts and combine around any exchange; forward, and forward with backward.

All contestants get the same weights and moe_rt's own router and experts, so only the exchange differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_rt.bench.dense import make_experts, make_grad_out, make_router
from moe_rt.bench.expect import Expectation
from moe_rt.bench.inputs import Inputs
from moe_rt.bench.step import Step
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.router import Router

if TYPE_CHECKING:
    from moe_rt.bench.contestants.base import Exchange


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
