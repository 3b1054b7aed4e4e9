"""Gradient clipping by the global norm, for any distribution of parameters over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_rt.errors import InvalidConfig
from moe_rt.nn.part import Part
from moe_rt.nn.spread import SpreadModule, spread_modules

Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of `model` in place to a norm of at most `max_norm`. Collective; the host does not wait.

    Every parameter counts once: parts of a DTensor are summed over the ranks that share it, and plain experts of a
    MoELayer over the layer's group. All other plain parameters are assumed to be equal on all ranks. Squares are summed
    by expert first, so that gradients with equal bits have a norm with equal bits on any number of ranks.

    Returns:
        The norm before scaling, an fp64 scalar, equal on all ranks.

    Raises:
        InvalidConfig: a layer's ranks are threads, which torch.distributed does not support.
    """
    holders = {id(p): experts for _, module, experts in spread_modules(model) for p in module.parameters()}
    # Gradients by the groups to sum over. Parameters without a gradient count also: ranks must call equal collectives.
    spread: dict[Groups, list[tuple[Tensor, SpreadModule | None]]] = {}
    for p in model.parameters():
        experts = holders.get(id(p))
        groups = () if experts is None or experts.num_ranks == 1 else _ep_group(p, experts)
        if isinstance(p, DTensor):
            groups += tuple(p.device_mesh.get_group(i) for i, at in enumerate(p.placements) if not at.is_replicate())
        grads = spread.setdefault(groups, [])
        if p.grad is not None:
            by_expert = experts is not None and not isinstance(p, DTensor) and p.shape[:1] == (len(experts.expert_ids),)
            grads.append((_local_part(p, p.grad), experts if by_expert else None))

    most_experts = max((experts.num_experts for experts in holders.values()), default=0)
    squares = torch.zeros(most_experts + 1, dtype=torch.float64, device=next(model.parameters()).device)
    for groups, grads in spread.items():
        part = _squares(grads, torch.zeros_like(squares))
        for group in groups:
            dist.all_reduce(part, group=group)
        squares += part
    norm = squares.sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in spread.values():
        if grads:
            torch._foreach_mul_([grad for grad, _ in grads], scale)
    return norm


def _squares(grads: list[tuple[Tensor, SpreadModule | None]], squares: Tensor) -> Tensor:
    """Add to squares [E + 1] those of each expert's gradients, in place, and at the end those of all others."""
    others = [grad for grad, experts in grads if experts is None]
    if others:
        squares[-1] += torch.stack(torch._foreach_norm(others, 2, torch.float64)).square().sum()
    for grad, experts in grads:
        if experts is not None and grad.numel():
            ids = torch.tensor(experts.expert_ids, device="cpu").to(squares.device, non_blocking=True)
            squares[ids] += torch.linalg.vector_norm(grad.flatten(1), dim=1, dtype=torch.float64).square()
    return squares


def _local_part(p: nn.Parameter, grad: Tensor) -> Tensor:
    if isinstance(grad, Part):
        return grad.to_local()
    if not (isinstance(p, DTensor) and isinstance(grad, DTensor)):
        return grad
    if grad.placements != p.placements:  # autograd postpones some sums over ranks
        p.grad = grad = grad.redistribute(placements=p.placements)
    return grad.to_local()


def _ep_group(p: nn.Parameter, experts: SpreadModule) -> Groups:
    if experts.over_mesh and isinstance(p, DTensor):
        return ()  # its mesh includes the layer's group
    if experts.process_group is None:
        raise InvalidConfig(
            f"group: got {experts.num_ranks} ranks that are threads, expected a ProcessGroup or DeviceMesh"
        )
    return (experts.process_group,)
