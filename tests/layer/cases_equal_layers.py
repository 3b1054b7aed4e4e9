"""One batch through a layer with sums="invariant", split over any number of ranks, as functions of a rank."""

from __future__ import annotations

from typing import Any

import torch
from layer.cases_layer import HIDDEN, config
from torch import Tensor

from moe_rt import MoELayer


def make_batch(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return all tokens and the gradient of their outputs."""
    g = torch.Generator().manual_seed(7)
    x, grad = (torch.randn(tokens, HIDDEN, generator=g).to(dtype) for _ in range(2))
    return x, grad


@torch.no_grad()
def set_weights(layer: MoELayer) -> None:
    """Set each parameter to the same numbers on every rank, and an expert's to its own; threads share torch's seed."""
    for seed, (name, parameter) in enumerate(sorted(layer.named_parameters())):
        g = torch.Generator().manual_seed(seed)
        of_experts = name.startswith("experts.")
        shape = (layer.config.num_experts, *parameter.shape[1:]) if of_experts else parameter.shape
        drawn = torch.randn(shape, generator=g) * 0.3
        parameter.copy_(drawn[list(layer.expert_ids)] if of_experts else drawn)


def part_of_layer(
    group: Any, counts: list[int], dtype: torch.dtype, changes: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Return this rank's outputs and gradients of x, its experts' gradients, and its part of the router's."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    options = dict(sums="invariant", aux_loss_coef=0.0, z_loss_coef=0.0, num_max_tokens_per_rank=sum(counts))
    layer = MoELayer(config(**options, **changes), group)
    set_weights(layer)
    layer = layer.to(dtype)
    x, grad = make_batch(sum(counts), dtype)
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    x = x[mine].clone().requires_grad_()
    for _ in range(2):  # both windows
        layer.zero_grad()
        out, _ = layer(x)
        (grad_x,) = torch.autograd.grad(out, x, grad[mine], retain_graph=True)
        out.backward(grad[mine])
    assert layer.router.weight.grad is not None
    experts = {name: p.grad for name, p in layer.experts.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "grad_x": grad_x}, experts, layer.router.weight.grad


def sequences_of_layer(group: Any, dtype: torch.dtype, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Run this rank's part of 4 sequences of 16 tokens with balance losses; return gradients by name.

    They are of the sum over ranks of the outputs' product with a fixed gradient, and of the mean of the losses.
    """
    options = dict(sums="invariant", aux_loss_coef=0.1, z_loss_coef=0.01, num_max_tokens_per_rank=64)
    layer = MoELayer(config(**options, **changes), group)
    set_weights(layer)
    x, grad = (t.view(4, 16, HIDDEN).chunk(group.size)[group.rank] for t in make_batch(64, dtype))
    out, aux = layer(x)
    ((out * grad).sum() + aux.loss / group.size).backward()
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
