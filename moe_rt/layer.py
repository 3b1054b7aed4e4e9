"""The MoE layer: router, dispatch, this rank's experts, combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_rt.buffer import Buffer, Group
from moe_rt.config import Overflow
from moe_rt.errors import InvalidConfig
from moe_rt.experts import SwiGLUExperts
from moe_rt.native import activation
from moe_rt.pool import shared_buffer
from moe_rt.router import Router, RouterAux, ScoreFunc


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and choices of a layer; the same on every rank.

    Attributes:
        hidden, intermediate, num_experts, num_topk: H, F, E, K.
        num_max_tokens_per_rank: the most tokens of one forward on any rank; sizes the symmetric buffer.
        dtype: what rows travel and experts compute in; parameters keep their own dtype and are cast.
        score_func, norm_topk, route_scale, aux_loss_coef, z_loss_coef: see `moe_rt.router.Router`.
        capacity_factor, overflow, placement, timeout_s: see `moe_rt.Buffer`.
    """

    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int
    num_max_tokens_per_rank: int
    dtype: torch.dtype = torch.float32
    score_func: ScoreFunc = "softmax"
    norm_topk: bool = True
    route_scale: float = 1.0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    capacity_factor: float | None = None
    overflow: Overflow = "raise"
    placement: Sequence[int] | None = None
    timeout_s: float = field(default=120.0, repr=False)

    def __post_init__(self) -> None:
        if self.intermediate < 1:
            raise InvalidConfig(f"intermediate: got {self.intermediate}, expected a positive integer")
        if self.score_func not in ("softmax", "sigmoid"):
            raise InvalidConfig(f'score_func: got "{self.score_func}", expected "softmax" or "sigmoid"')

    def buffer_sizes(self) -> dict[str, Any]:
        """The keyword arguments of the `moe_rt.Buffer` that a layer of this config needs."""
        return {
            "num_max_tokens_per_rank": self.num_max_tokens_per_rank,
            "hidden": self.hidden,
            "num_topk": self.num_topk,
            "num_experts": self.num_experts,
            "dtype": self.dtype,
            "capacity_factor": self.capacity_factor,
            "overflow": self.overflow,
            "timeout_s": self.timeout_s,
            "placement": None if self.placement is None else tuple(self.placement),
        }


class MoELayer(nn.Module):
    """A mixture of SwiGLU experts spread over the ranks of `group`.

    Making a layer and calling it are collective over the group. Layers of one group and one size share a buffer.

    Parameters: `router.weight` [E, H], the same on every rank; `experts.gate_up_proj` [L, 2F, H] and
    `experts.down_proj` [L, H, F], this rank's slice of the global tensors in the order of `expert_ids`. Ranks seeded
    alike start with the same global weights whatever their number.

    Gradients: `experts.*` hold the sum over all ranks of the group; `router.*` hold this rank's part. With a loss
    averaged over ranks, divide the former by the number of ranks and all-reduce the latter to a mean.

    Args:
        config: see MoEConfig.
        group: see moe_rt.Buffer.
        buffer: use this one instead; its sizes must be the config's.
    """

    def __init__(self, config: MoEConfig, group: Group = None, *, buffer: Buffer | None = None) -> None:
        super().__init__()
        self.config = config
        self.buffer = shared_buffer(group, **config.buffer_sizes()) if buffer is None else _fitting(buffer, config)
        self.expert_ids = self.buffer.spec.local_experts(self.buffer.rank)
        self.tag = self.buffer.new_tag()
        device = self.buffer.device
        with device:
            self.router = Router(
                config.hidden,
                config.num_experts,
                config.num_topk,
                score_func=config.score_func,
                norm_topk=config.norm_topk,
                route_scale=config.route_scale,
                aux_loss_coef=config.aux_loss_coef,
                z_loss_coef=config.z_loss_coef,
            )
            self.experts = SwiGLUExperts(len(self.expert_ids), config.hidden, config.intermediate)
        if device.type == "cuda":
            activation.prepare(device, config.dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws N(0, 1 / fan-in), on the CPU whatever the device.

        Every expert has its own stream, so the draw does not depend on where it lives.
        """
        _draw(self.router.weight, None)
        seeds = torch.randint(2**62, (self.config.num_experts,), device="cpu").tolist()
        for local, expert in enumerate(self.expert_ids):
            generator = torch.Generator().manual_seed(seeds[expert])
            for weight in (self.experts.gate_up_proj, self.experts.down_proj):
                _draw(weight[local], generator)

    def forward(self, x: Tensor) -> tuple[Tensor, RouterAux]:
        """x [..., H] -> the same shape and dtype, and the router's losses. Collective."""
        topk_idx, topk_weights, aux = self.router(x)
        rows = x.reshape(-1, self.config.hidden).to(self.config.dtype)
        recv_x, recv_weights, handle = self.buffer.dispatch(rows, topk_idx, topk_weights, tag=self.tag)
        y = self.experts(recv_x, handle.offs)
        out = self.buffer.combine(y, recv_weights, handle)
        return out.to(x.dtype).reshape(x.shape), aux

    def extra_repr(self) -> str:
        return f"{self.config}, expert_ids={self.expert_ids}"


def _draw(weight: Tensor, generator: torch.Generator | None) -> None:
    drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
    weight.copy_(drawn.normal_(std=weight.shape[-1] ** -0.5, generator=generator))


def _fitting(buffer: Buffer, config: MoEConfig) -> Buffer:
    for name in ("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts", "dtype"):
        got, expected = getattr(buffer.spec, name), getattr(config, name)
        if got != expected:
            raise InvalidConfig(f"buffer.{name}: got {got}, expected {expected} as in the layer's config")
    return buffer
