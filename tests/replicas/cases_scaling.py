"""Loss scaling over experts: a step is skipped by all ranks or by none, and scales stay equal."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from replicas.cases_replicas import Net, batch, local, net, same_on_all
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from moe_rt.parallel import clip_grad_norm_ as own_clip
from moe_rt.parallel import expert_parameters, prepare, shard_experts

# Ranks whose gradients overflow, by step.
WHERE = {1: (0,), 3: (1,), 4: (0, 1)}
STEPS = 6
SCALER_OP = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def wrap(model: Net, group: Any, how: str) -> nn.Module:
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
        return model
    return DistributedDataParallel(model)


def scaled(group: Any, over: str, clip: str, optimizers: int = 1) -> tuple[list[float], list[bool], bool, bool]:
    """Return scales after every step, whether experts moved in it, and whether scales and copies agree on all ranks."""
    mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("efsdp", "ep"))
    DTensor._op_dispatcher._custom_op_handlers.pop(SCALER_OP, None)  # as in a process without earlier cases
    with net(mesh["ep"] if over in ("mesh", "sharded") else group, prepared=over != "sharded") as model:
        if over == "sharded":
            shard_experts(model, mesh["efsdp"])
        wrapped = wrap(model, group, "fsdp" if over in ("fsdp", "sharded") else "ddp")
        experts = {id(p) for p in (expert_parameters(model) or model.experts.parameters())}
        others = [p for p in model.parameters() if id(p) not in experts]
        lists = [model.parameters()] if optimizers == 1 else [others, model.experts.parameters()]
        stepping = [torch.optim.AdamW(params, lr=1e-3) for params in lists]
        scaler = GradScaler("cpu", init_scale=1024.0)
        scales, moved = [], []
        for step in range(STEPS):
            x = batch(step, group.rank(), group.size())
            with torch.autocast("cpu", torch.bfloat16):
                y = wrapped(x)
            scaler.scale((y.float() - x.flip(-1)).square().mean()).backward()
            if group.rank() in WHERE.get(step, ()):
                local_grad(model.experts.down_proj)[0, 0, 0] = float("inf")
            before = local(model.experts.down_proj)
            for optimizer in stepping:
                if clip:
                    scaler.unscale_(optimizer)
            if clip == "torch":
                clip_grad_norm_(model.parameters(), 1.0)
            elif clip:
                own_clip(model, 1.0)
            for optimizer in stepping:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in stepping:
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
            moved.append(not torch.equal(local(model.experts.down_proj), before))
        equal = same_on_all(group, torch.tensor(scales)) and same_on_all(group, torch.tensor(moved).float())
        weight = model.a.weight.full_tensor() if hasattr(model.a.weight, "full_tensor") else model.a.weight
        return scales, moved, equal, same_on_all(group, weight)


def local_grad(p: Any) -> torch.Tensor:
    return p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad


def frozen(group: Any) -> bool:
    """The scaler of rank 1, whose experts have no gradients, skips the step for rank 0's NaN."""
    with net(group, prepared=False) as model:
        if group.rank() == 1:
            model.experts.requires_grad_(False)
        prepare(model)
        wrapped = DistributedDataParallel(model)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=64.0)
        scaler.scale(wrapped(batch(0, group.rank(), 2)).square().mean()).backward()
        if group.rank() == 0:
            local_grad(model.experts.down_proj)[0, 0, 0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        found = torch.tensor([scaler.get_scale()])
        dist.barrier()
        return same_on_all(group, found) and found.item() == 32.0
