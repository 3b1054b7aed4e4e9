"""moe_rt itself, through its public Python API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from moe_rt.buffer.buffer import Buffer
from moe_rt.config.options import Route, Sums
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.base import Delivery, Exchange, Step
from moe_rt.lab.bench.crossing import Unit
from moe_rt.lab.bench.expect import Expectation
from moe_rt.lab.bench.inputs import Inputs
from moe_rt.lab.bench.world import World
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.layer import MoEConfig, MoELayer
from moe_rt.nn.router import Router

UNITS: dict[Route, Unit] = {"flat": "rank", "two_level": "node"}


class MoeRt(Exchange):
    """`moe_rt.Buffer`, and for the layer op `moe_rt.MoELayer`."""

    name = "moe_rt"
    route: ClassVar[Route | Literal["auto"]] = "auto"
    sums: ClassVar[Sums] = "ranked"
    num_chunks: ClassVar[int] = 1  # of the layer
    num_threads: ClassVar[int] = 1

    def __init__(self, case: Case, world: World) -> None:
        super().__init__(case, world)
        self.buffer = Buffer(
            world.group,
            num_max_tokens_per_rank=case.tokens,
            hidden=case.hidden,
            num_topk=case.topk,
            num_experts=case.experts,
            dtype=case.torch_dtype,
            heap=case.heap,
            route=self.route,
            sums=self.sums,
            num_threads=self.num_threads,
        )
        self.unit = UNITS[self.buffer.route]

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        recv_x, recv_weights, handle = self.buffer.dispatch(x, topk_idx, topk_weights)
        return Delivery(recv_x, handle.offs, (recv_weights, handle))

    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        recv_weights, handle = delivery.state
        return self.buffer.combine(y, recv_weights, handle)

    def layer(self, router: Router, experts: SwiGLUExperts) -> nn.Module:
        config = MoEConfig(
            hidden=self.case.hidden,
            intermediate=self.case.intermediate,
            num_experts=self.case.experts,
            num_topk=self.case.topk,
            num_max_tokens_per_rank=self.case.tokens,
            dtype=self.case.torch_dtype,
            sums=self.sums,
            num_chunks=self.num_chunks,
        )
        layer = MoELayer(config, buffer=self.buffer)
        router.row_wise = experts.row_wise = self.sums == "invariant"
        layer.router, layer.experts = router, experts
        return _OutputOnly(layer)

    def close(self) -> None:
        self.buffer.close()


class Flat(MoeRt):
    """The flat route: rows cross the network once for each distinct rank, not for each node."""

    name = "moe_rt_flat"
    route = "flat"


class Invariant(MoeRt):
    """Sums that do not depend on the number of ranks: combine returns a row for each expert."""

    name = "moe_rt_invariant"
    sums = "invariant"

    def __init__(self, case: Case, world: World) -> None:
        super().__init__(case, world)
        self.unit = None  # rows of combine cross once for each expert, those of dispatch do not


class Chunked(MoeRt):
    """A layer in chunks: exchanges are under way while the experts compute."""

    name = "moe_rt_chunks"
    num_chunks = 4


class Timed(MoeRt):
    """moe_rt without a breakdown of its own time, which takes longer than to time it."""


class WithGradients(MoeRt):
    """Dispatch and combine with both of their backwards."""

    name = "moe_rt_gradients"

    def _pair_step(self, inputs: Sequence[Inputs], expect: Expectation) -> Step:
        forward = super()._pair_step(inputs, expect)

        def run(i: int) -> tuple[Delivery, Tensor]:
            tokens = inputs[i % len(inputs)]
            x, weights = (given.detach().requires_grad_() for given in (tokens.x, tokens.topk_weights))
            with torch.enable_grad():
                delivery = self.dispatch(x, tokens.topk_idx, weights)
                out = self.combine(delivery.rows, delivery)
                torch.autograd.grad(out, (x, weights), out.detach())
            return delivery, out.detach()

        return Step(run, forward.check, "forward+backward")


class _OutputOnly(nn.Module):
    """Drops the router's losses, which the benchmark does not use."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer, self.router = layer, layer.router

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out
