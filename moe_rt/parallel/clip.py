"""Gradient clipping by the global norm, for any distribution of parameters over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_rt.errors import InvalidConfig
from moe_rt.nn.part import Part
from moe_rt.nn.spread import SpreadModule, spread_parameters

Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of `model` in place to a norm of at most `max_norm`. Collective; the host does not wait.

    Every parameter counts once: parts of a DTensor are summed over the ranks that share it, and plain experts of a
    MoELayer over the layer's group. All other plain parameters are assumed to be equal on all ranks.

    Returns:
        The norm before scaling, an fp64 scalar, equal on all ranks.

    Raises:
        InvalidConfig: a layer's ranks are threads, which torch.distributed does not support.
    """
    ep_groups = {id(p): _ep_group(p, experts) for p, experts in spread_parameters(model).values()}
    # Gradients by the groups to sum over. Parameters without a gradient count also: ranks must call equal collectives.
    spread: dict[Groups, list[Tensor]] = {}
    for p in model.parameters():
        groups = ep_groups.get(id(p), ())
        if isinstance(p, DTensor):
            groups += tuple(p.device_mesh.get_group(i) for i, at in enumerate(p.placements) if not at.is_replicate())
        grads = spread.setdefault(groups, [])
        if p.grad is not None:
            grads.append(_local_part(p, p.grad))

    squares = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for groups, grads in spread.items():
        part = torch.zeros_like(squares)
        if grads:
            part = torch.stack(torch._foreach_norm(grads, 2, torch.float64)).square().sum()
        for group in groups:
            dist.all_reduce(part, group=group)
        squares += part
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in spread.values():
        if grads:
            torch._foreach_mul_(grads, scale)
    return norm


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
