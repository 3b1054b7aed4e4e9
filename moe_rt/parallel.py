"""Shards a model's experts with FSDP2 over the ranks that hold the same ones, and scales their gradients for it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from moe_rt.layer import MoELayer


def shard_experts(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Applies `fully_shard` to the experts of every MoELayer in `model`. Collective over the mesh.

    Layers are made with `mesh["ep"]` of a mesh ("efsdp", "ep"); `mesh` here is `mesh["efsdp"]`. Call this first, then
    `fully_shard` for the blocks that hold the layers, over a mesh of all efsdp * ep ranks: the gradients of experts
    then are, as all others, those of the loss averaged over all of these ranks.

    Args:
        model: a layer, or anything that has some.
        mesh: the ranks that hold the same experts, one-dimensional.
        options: other arguments of `fully_shard`, such as mp_policy.
    """
    for layer in model.modules():
        if not isinstance(layer, MoELayer):
            continue
        whole = len(layer.expert_ids) % mesh.size() == 0

        def placement(weight: nn.Parameter, whole: bool = whole) -> Shard:
            # Else a part of every expert, so that no rank holds more than another; FSDP wants these parts to be equal.
            return Shard(0 if whole or weight.shape[1] % mesh.size() else 1)

        experts = fully_shard(layer.experts, mesh=mesh, shard_placement_fn=placement, **options)
        # FSDP would divide by the size of `mesh` alone, but the gradients are sums over the tokens of all ep ranks too.
        experts.set_gradient_divide_factor(mesh.size() * layer.buffer.num_ranks)
        if mesh.size() > 1:  # torch divides twice where this is set and there is nothing to reduce
            experts.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces
