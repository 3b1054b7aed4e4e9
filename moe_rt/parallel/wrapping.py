"""Prepares models with MoELayers for data parallelism: DistributedDataParallel, or FSDP2 with sharded experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from moe_rt.errors import InvalidConfig
from moe_rt.group.groups import process_group_of
from moe_rt.nn.averaging import Mean
from moe_rt.nn.layer import MoELayer
from moe_rt.nn.part import Part
from moe_rt.nn.spread import SpreadModule, scale_all_gradients, spread_modules, spread_names, spread_parameters


def prepare(model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None) -> nn.Module:
    """Prepare `model` for DistributedDataParallel(model) or fully_shard(model). Collective over the group.

    Both wrappers then skip the experts of every MoELayer, and each backward computes the experts' `grad` like that of
    other parameters: the mean over the group's ranks, also while micro-batches accumulate and under `no_sync`. If
    several expert-parallel groups hold copies of the experts, all start with the copies of the first group, and
    gradients are averaged over the groups. Layers of a single rank are unchanged: they need no special treatment.

    Call it with the same model that is wrapped, after all its layers exist. docs/howto/ddp.md has an example.

    Args:
        model: a module that contains MoELayers; changed in place.
        group: the ranks that the wrapper averages over: all ranks of a mesh, or None for the default group.

    Returns:
        `model`.

    Raises:
        InvalidConfig: on every rank, if the group does not consist of whole expert-parallel groups of one size; if
            ranks are threads, which torch.distributed does not support; if experts are sharded already; or if a module
            of `own_experts` has copies but no forward.
    """
    for path, _, inner in spread_modules(model):
        _require_plain(path or "model", inner)
    if group is None and not dist.is_initialized():
        return model  # a single rank, and no wrapper
    scale_all_gradients()  # fully_shard makes DTensors of the others
    ranks = _process_group(group)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for _, experts, inner in spread_modules(model):
        same, inner.trains_somewhere = _agree(experts, inner, ranks)
        if inner.num_ranks == 1:
            continue
        inner.mark_parameters(experts)
        if len(same) > 1:
            inner.check_copies()
            if same not in made:
                made[same] = dist.new_group(list(same), use_local_synchronization=True)
            _broadcast(experts, made[same])
        if inner.mean is None:
            replicate(experts)
        inner.mean_of_rows = experts is not inner
        inner.mean = Mean(ranks.size(), made[same].group_name if len(same) > 1 else None)
    _name_to_ddp(model)
    return model


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of experts that are spread over several ranks, including adapters on them.

    They differ between ranks. Exclude them from code that makes parameters equal on all ranks, and give them a separate
    optimizer if the main one shards its state over ranks, as ZeroRedundancyOptimizer does.
    """
    return [p for p, _ in spread_parameters(model).values()]


def shard_experts(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Apply `fully_shard` to the experts of every MoELayer in `model`. Collective over the mesh.

    Make the layers with `mesh["ep"]` of a mesh ("efsdp", "ep"), and pass `mesh["efsdp"]` here. Call this first, then
    `fully_shard` for the blocks that hold the layers, over a mesh of all efsdp * ep ranks. All gradients, including
    those of experts, are then those of the loss averaged over all of these ranks.

    Args:
        model: a layer, or a module that contains layers.
        mesh: the ranks that hold the same experts, one-dimensional.
        options: other arguments of `fully_shard`, such as mp_policy.

    Raises:
        InvalidConfig: `prepare` was called before.
    """
    for path, layer in model.named_modules():
        if not isinstance(layer, MoELayer):
            continue
        experts = layer.spread
        if experts.mean is not None:
            raise InvalidConfig(f"{path or 'model'}: got experts after prepare, expected one of the two calls")
        whole = len(layer.expert_ids) % mesh.size() == 0

        def placement(weight: nn.Parameter, whole: bool = whole) -> Shard:
            # Whole experts if they divide evenly; else a slice of each, if these are equal, as FSDP requires.
            return Shard(0 if whole or weight.shape[1] % mesh.size() else 1)

        experts.sharded = True
        experts.param_dtype = getattr(options.get("mp_policy"), "param_dtype", None)
        experts.unmark_parameters()
        # FSDP divides only by the size of `mesh`, but gradients also sum over the tokens of all ep ranks.
        if layer.buffer.num_ranks > 1:
            experts.mean = Mean(layer.buffer.num_ranks, None)
        fully_shard(experts, mesh=mesh, shard_placement_fn=placement, **options)


def _replicate(module: nn.Module) -> nn.Module:
    """Return the module. FSDP2 skips modules to which a contract named `replicate` was applied, and their children."""
    return module


_replicate.__name__ = "replicate"  # the name that FSDP2 checks; pickles find the function by __qualname__
replicate: Any = contract()(_replicate)


def _require_plain(path: str, experts: SpreadModule) -> None:
    if experts.num_ranks > 1 and experts.process_group is None:
        got = f"{experts.num_ranks} ranks that are threads"
        raise InvalidConfig(f"{path}: got {got}, expected a ProcessGroup or DeviceMesh")
    if experts.sharded:
        raise InvalidConfig(f"{path}: got experts after shard_experts, expected one of the two calls")


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    return process_group_of(group) if isinstance(group, DeviceMesh) else group


def _agree(experts: nn.Module, inner: SpreadModule, ranks: dist.ProcessGroup) -> tuple[tuple[int, ...], bool]:
    """Return the ranks with copies of this rank's experts, one per group, and if any rank's experts need gradients.

    Collective over `ranks`.
    """
    everyone = dist.get_process_group_ranks(ranks)
    ep = inner.process_group
    mine = [dist.get_rank()] if ep is None else dist.get_process_group_ranks(ep)
    device = "cuda" if dist.get_backend(ranks) == "nccl" else "cpu"
    row = torch.full((dist.get_world_size() + 1,), -1, device=device)
    row[: len(mine)] = torch.tensor(mine, device=device)
    row[-1] = any(p.requires_grad for p in experts.parameters())
    rows = [torch.empty_like(row) for _ in everyone]
    dist.all_gather(rows, row, group=ranks)
    groups = [[r for r in other[:-1].tolist() if r >= 0] for other in rows]
    for rank, other in zip(everyone, groups, strict=True):
        if len(other) != len(groups[0]) or not set(other) <= set(everyone):
            expected = f"groups of {len(groups[0])} within {everyone}"
            raise InvalidConfig(f"group: got an expert-parallel group {other} on rank {rank}, expected {expected}")
    place = mine.index(dist.get_rank())
    same = tuple(rank for rank, other in zip(everyone, groups, strict=True) if other.index(rank) == place)
    return same, any(bool(other[-1]) for other in rows)


@torch.no_grad()
def _broadcast(experts: nn.Module, copies: dist.ProcessGroup) -> None:
    """Broadcast the first copy, as DistributedDataParallel does for other parameters, since seeds may differ."""
    for p in experts.parameters():
        part = p.to_local() if isinstance(p, (DTensor, Part)) else p.detach()
        dist.broadcast(part, group=copies, group_src=0)


def _name_to_ddp(model: nn.Module) -> None:
    """Make DistributedDataParallel ignore the experts' parameters, in the model and in every module of it."""
    for module in model.modules():
        names = spread_names(module)
        if names:
            ignored = names.union(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
