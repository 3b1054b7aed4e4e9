"""A plain dense MoE layer, and functions that ranks run in the layer tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rt import MoEConfig, MoELayer

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 16, 24, 7, 3, 10


def config(**changes: Any) -> MoEConfig:
    fields: dict[str, Any] = dict(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        num_topk=TOPK,
        num_max_tokens_per_rank=TOKENS,
        aux_loss_coef=0.1,
        z_loss_coef=0.01,
    )
    return MoEConfig(**{**fields, **changes})


def dense_layer(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, score_func: str = "softmax") -> Tensor:
    """Apply every token's experts in one loop: router [E, H], gate_up [E, 2F, H], down [E, H, F]."""
    logits = F.linear(x.float(), router.float()) if x.dtype != torch.float64 else F.linear(x, router)
    scores = logits.softmax(-1) if score_func == "softmax" else logits.sigmoid()
    weights, idx = scores.topk(TOPK, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        gate, up = F.linear(x, gate_up[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out = out + ((idx == expert) * weights).sum(-1, keepdim=True).to(x.dtype) * y
    return out


def inputs_for(rank: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(100 + rank)
    return torch.randn(num_tokens, HIDDEN, generator=g).to(dtype)


def forward_backward(group: Any, num_tokens: list[int], changes: dict[str, Any]) -> dict[str, Tensor]:
    """Return output and all gradients of sum(out * fixed) on this rank; parameters are the same for every group."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    layer = seeded_layer(config(**changes), group)
    x = inputs_for(rank, num_tokens[rank]).requires_grad_()
    out, _ = layer(x)
    (out * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    result = {
        "out": out.detach(),
        "x": x.grad,
        "router": layer.router.weight.grad,
        "gate_up": layer.experts.gate_up_proj.grad,
        "down": layer.experts.down_proj.grad,
        "params": [p.detach() for p in (layer.router.weight, layer.experts.gate_up_proj, layer.experts.down_proj)],
        "expert_ids": layer.expert_ids,
    }
    layer.buffer.close()
    return result


def seeded_layer(cfg: MoEConfig, group: Any) -> MoELayer:
    """Return a layer with weights from a separate generator: ranks that are threads share the global RNG."""
    layer = MoELayer(cfg, group)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(cfg.num_experts, cfg.hidden, generator=g))
        gate_up = torch.randn(cfg.num_experts, 2 * cfg.intermediate, cfg.hidden, generator=g) * 0.3
        down = torch.randn(cfg.num_experts, cfg.hidden, cfg.intermediate, generator=g) * 0.3
        layer.experts.gate_up_proj.copy_(gate_up[layer.expert_ids])
        layer.experts.down_proj.copy_(down[layer.expert_ids])
    return layer


def two_steps_with_poisoned_memory(group: Any) -> list[bool]:
    """Run two optimizer steps with NaN in fresh tensors; return whether gradients and parameters are finite."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all(), "the poison works"
    try:
        layer = seeded_layer(config(), group)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        finite = []
        for step in range(2):
            x = inputs_for(step, 4).requires_grad_()
            out, aux = layer(x)
            (out.square().mean() + aux.loss).backward()
            grads = [x.grad, *(p.grad for p in layer.parameters())]
            finite.append(all(bool(g.isfinite().all()) for g in grads))
            optimizer.step()
            optimizer.zero_grad()
            finite.append(all(bool(p.isfinite().all()) for p in layer.parameters()))
        layer.buffer.close()
        return finite
    finally:
        torch.use_deterministic_algorithms(False)


def compiled(group: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest difference between eager and compiled in output and router gradient."""
    layer = seeded_layer(config(dtype=dtype), group)
    x = inputs_for(0, 8)

    def step(module: Any) -> tuple[Tensor, Tensor]:
        layer.zero_grad()
        out, aux = module(x)
        (out.square().mean() + aux.loss).backward()
        assert layer.router.weight.grad is not None
        return out.detach(), layer.router.weight.grad.clone()

    eager, fused = step(layer), step(torch.compile(layer, fullgraph=True))
    layer.buffer.close()
    return float((eager[0] - fused[0]).abs().max()), float((eager[1] - fused[1]).abs().max())


def initial_parameters(group: Any) -> tuple[list[int], Tensor, Tensor]:
    torch.manual_seed(42)
    layer = MoELayer(config(), group)
    layer.buffer.close()
    return layer.expert_ids, layer.experts.gate_up_proj.detach(), layer.router.weight.detach()


def shares_buffer(group: Any) -> tuple[bool, bool, int]:
    one, two = MoELayer(config(), group), MoELayer(config(), group)
    other = MoELayer(config(num_topk=2), group)
    x = inputs_for(0, 4)
    out, _ = two(one(x)[0])
    out.sum().backward()
    same, differ, tags = one.buffer is two.buffer, one.buffer is not other.buffer, len({one.tag, two.tag})
    one.buffer.close()
    other.buffer.close()
    return same, differ, tags
