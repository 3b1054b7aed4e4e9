"""Makes models with MoELayers right under data parallelism: DistributedDataParallel, or FSDP2 with experts sharded."""

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
from moe_rt.heap.groups import process_group_of
from moe_rt.nn.averaging import Mean
from moe_rt.nn.layer import MoELayer
from moe_rt.nn.part import Part
from moe_rt.nn.spread import SpreadModule, spread_modules, spread_names, spread_parameters


def prepare(model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None) -> nn.Module:
    """Makes `model` ready for DistributedDataParallel(model) or fully_shard(model). Collective over the group.

    Both then leave the experts of every MoELayer alone, and each backward leaves in the experts' `grad` what it leaves
    in all others': the mean over the ranks of the group of each rank's own gradient, also while micro-batches add up
    and under `no_sync`. Experts that several expert-parallel groups hold alike start as those of the first, and their
    gradients are averaged over these groups. Layers of a single rank are left as they are: they are like any other.

    Call it with the very model that is wrapped, once all its layers are there. docs/howto/ddp.md has an example.

    Args:
        model: anything that has some MoELayers; changed in place.
        group: the ranks that the wrapper averages over; all those of a mesh, or None for the default group.

    Returns:
        model.

    Raises:
        InvalidConfig: on every rank, if the group is not made of whole expert-parallel groups of one size; if ranks are
            threads, which torch.distributed does not know; or if experts have been sharded already.
    """
    for path, _, inner in spread_modules(model):
        _require_plain(path or "model", inner)
    if group is None and not dist.is_initialized():
        return model  # a single rank, and no wrapper
    ranks = _process_group(group)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for _, experts, inner in spread_modules(model):
        same, inner.trains_somewhere = _agree(experts, inner, ranks)
        if inner.num_ranks == 1:
            continue
        inner.mark_parameters(experts)
        if len(same) > 1:
            if same not in made:
                made[same] = dist.new_group(list(same), use_local_synchronization=True)
            _broadcast(experts, made[same])
        if inner.mean is None:
            replicate(experts)
        inner.mean = Mean(ranks.size(), made[same].group_name if len(same) > 1 else None)
    _name_to_ddp(model)
    return model


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of experts that are spread over several ranks, adapters on them included.

    Each rank has others. What makes the parameters of all ranks equal wants a model without them, and an optimizer that
    shares its work out over ranks, as ZeroRedundancyOptimizer does, leaves them to an optimizer of their own.
    """
    return [p for p, _ in spread_parameters(model).values()]


def shard_experts(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Applies `fully_shard` to the experts of every MoELayer in `model`. Collective over the mesh.

    Layers are made with `mesh["ep"]` of a mesh ("efsdp", "ep"); `mesh` here is `mesh["efsdp"]`. Call this first, then
    `fully_shard` for the blocks that hold the layers, over a mesh of all efsdp * ep ranks: the gradients of experts
    then are, as all others, those of the loss averaged over all of these ranks.

    Args:
        model: a layer, or anything that has some.
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
            # Else a part of every expert, so that no rank holds more than another; FSDP wants these parts to be equal.
            return Shard(0 if whole or weight.shape[1] % mesh.size() else 1)

        experts.sharded = True
        experts.param_dtype = getattr(options.get("mp_policy"), "param_dtype", None)
        experts.unmark_parameters()
        # FSDP divides by the size of `mesh` alone, but the gradients are sums over the tokens of all ep ranks too.
        if layer.buffer.num_ranks > 1:
            experts.mean = Mean(layer.buffer.num_ranks, None)
        fully_shard(experts, mesh=mesh, shard_placement_fn=placement, **options)


def _replicate(module: nn.Module) -> nn.Module:
    """FSDP2 leaves modules alone to which an interface named `replicate` was applied, and all parts of theirs."""
    return module


_replicate.__name__ = "replicate"  # for FSDP2; a pickle of a module finds the function by __qualname__
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
    """The ranks that hold the experts of this one, one of each expert-parallel group; and whether any rank trains its.

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
    """As DistributedDataParallel does for all others, in case that groups were seeded differently."""
    for p in experts.parameters():
        part = p.to_local() if isinstance(p, (DTensor, Part)) else p.detach()
        dist.broadcast(part, group=copies, group_src=0)


def _name_to_ddp(model: nn.Module) -> None:
    """Names the experts' parameters to DistributedDataParallel, whichever part of the model it will get."""
    for module in model.modules():
        names = spread_names(module)
        if names:
            ignored = names.union(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
