"""Contestants that are fast because they are wrong. The benchmark must catch every one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from moe_rt.lab.bench.contestants.base import Delivery, ExchangeLayer
from moe_rt.lab.bench.contestants.moe import MoeRt
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.router import Router


class Zeros(MoeRt):
    """Returns memory that it has never written to."""

    name = "zeros"

    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        return torch.zeros_like(super().combine(y, delivery))


class Stale(MoeRt):
    """Runs the op once and returns that result every time."""

    name = "stale"
    first: Delivery | None = None

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        if self.first is None:
            self.first = super().dispatch(x, topk_idx, topk_weights)
        return replace(self.first)


class Misrouted(MoeRt):
    """Delivers the right rows to the wrong experts."""

    name = "misrouted"

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        delivery = super().dispatch(x, topk_idx, topk_weights)
        delivery.rows = delivery.rows.roll(1, dims=0)
        return delivery

    def layer(self, router: Router, experts: SwiGLUExperts) -> nn.Module:
        return ExchangeLayer(self, router, experts)  # moe_rt's own layer would not call the dispatch above


class OneWrongBit(MoeRt):
    """Changes the last bit of one element of one row."""

    name = "one wrong bit"

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        delivery = super().dispatch(x, topk_idx, topk_weights)
        delivery.rows.view(torch.int16)[0, -1] ^= 1
        return delivery


class Unweighted(MoeRt):
    """Drops the routing weights of half of the rows."""

    name = "unweighted"

    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        weights, handle = delivery.state
        weights = weights.clone()
        weights[::2] = 1
        return self.buffer.combine(y, weights, handle)


class OnOneRank(MoeRt):
    """Gets the last token wrong on rank 1 only, in every op but dispatch."""

    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        out = super().combine(y, delivery)
        if self.world.rank != 1:
            return out
        return torch.cat((out[:-1], self.wrong(out)))

    def wrong(self, out: Tensor) -> Tensor:
        """Return [1, H], which replaces the last row."""
        return out[:1]

    def layer(self, router: Router, experts: SwiGLUExperts) -> nn.Module:
        return ExchangeLayer(self, router, experts)  # moe_rt's own layer would not call the combine above


class OneWrongToken(OnOneRank):
    """Returns another token's output."""

    name = "one wrong token"


class Nan(OnOneRank):
    """Returns NaN in the last row."""

    name = "nan"

    def wrong(self, out: Tensor) -> Tensor:
        return out[-1:] * torch.nan


class Late(OnOneRank):
    """Returns the last row of the previous iteration."""

    name = "late"
    before: Tensor | None = None

    def wrong(self, out: Tensor) -> Tensor:
        late, self.before = self.before, out[-1:].detach().clone()
        return out[-1:] if late is None else late


class Honest(MoeRt):
    """No cheat: shows that a user's contestant can be given by its class path."""

    name = "honest"


class Broken(MoeRt):
    """Fails on one rank, while the others continue."""

    name = "broken"

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        if self.world.rank == 1:
            raise ArithmeticError("this rank is broken")
        return super().dispatch(x, topk_idx, topk_weights)
