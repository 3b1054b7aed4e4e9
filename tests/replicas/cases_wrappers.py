"""Wrappers, averagers and broadcasts leave experts as they are, or raise before they mix them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from replicas.cases_replicas import Net, backward, local, mesh_of, net
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable import replicate_with_fsdp as fsdp_replicate
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DataParallel, DistributedDataParallel

from moe_rt.parallel import expert_parameters, whole_state_dict

FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def sync_module_states(model: Net, group: Any) -> None:
    _sync_module_states(model, group, 1 << 20, 0, set(), True)


def model_averager(model: Net, group: Any) -> None:
    backward(model, group)  # the averager skips parameters without a gradient
    averager = PeriodicModelAverager(period=2)
    for _ in range(2):
        averager.average_parameters(model.parameters())


def averaged_parameters(model: Net, group: Any) -> None:
    average_parameters(iter(model.parameters()), group)


def broadcast_coalesced(model: Net, group: Any) -> None:
    dist._broadcast_coalesced(group, list(model.parameters()), 1 << 20, 0)


def all_reduced_gradients(model: Net, group: Any) -> None:
    backward(model, group)
    for p in model.parameters():
        dist.all_reduce(p.grad)


def flat_gradients(model: Net, group: Any) -> None:
    """All-reduce the gradients in one tensor, as apex and many loops do."""
    backward(model, group)
    dist.all_reduce(torch._utils._flatten_dense_tensors([p.grad for p in model.parameters()]))


def broadcast_data(model: Net, group: Any) -> None:
    """Broadcast `p.data`, as DeepSpeed and Horovod do."""
    for p in model.parameters():
        dist.broadcast(p.data, 0)


def reduce_scattered(model: Net, group: Any) -> None:
    for p in model.parameters():
        flat = torch.cat([p.detach().flatten(), torch.zeros(p.numel() % group.size())])
        dist.reduce_scatter_tensor(torch.empty(flat.numel() // group.size()), flat)


def functional_all_reduce(model: Net, group: Any) -> None:
    from torch.distributed import _functional_collectives as collectives

    for p in model.parameters():
        collectives.all_reduce(p.detach(), "avg", group)


REFUSED: dict[str, Callable[[Net, Any], Any]] = {
    "replicate": lambda model, group: backward(replicate(model), group),
    "fsdp_replicate": lambda model, group: backward(fsdp_replicate.replicate(model, mesh=mesh_of(group)), group),
    "dp": lambda model, group: DataParallel(model),
    **{f.__name__: f for f in (
        sync_module_states, model_averager, averaged_parameters, broadcast_coalesced, all_reduced_gradients,
        flat_gradients, broadcast_data, reduce_scattered, functional_all_reduce,
    )},
}  # fmt: skip
REFUSED_BARE: dict[str, Callable[[Net, Any], Any]] = {
    "ddp": lambda model, group: DistributedDataParallel(model),
    "fsdp1": lambda model, group: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fully_shard": lambda model, group: fully_shard(model, mesh=mesh_of(group)),
    "distribute_module": lambda model, group: distribute_module(model, mesh_of(group)),
}


def refused(group: Any, what: str, prepared: bool) -> bool:
    """Raise what the wrapper raises; experts must be unchanged."""
    with net(group, prepared) as model:
        before = local(model.experts.down_proj)
        try:
            {**REFUSED, **REFUSED_BARE}[what](model, group)
        finally:
            assert torch.equal(local(model.experts.down_proj), before)
    return False


def right(group: Any, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return gradients of a wrapper that leaves the experts out, and of DistributedDataParallel."""
    with net(group) as model, net(group) as other:
        wrapped: nn.Module = model
        if what == "replicate":
            replicate(model, ignored_modules=[model.experts])
        elif what == "fsdp_replicate":
            fsdp_replicate.replicate(model, mesh=mesh_of(group), ignored_params=set(expert_parameters(model)))
        elif what == "fully_shard":
            fully_shard(model, mesh=mesh_of(group))
        elif what == "fsdp1":
            wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        backward(wrapped, group)
        backward(DistributedDataParallel(other), group)

        def grads(m: nn.Module) -> dict[str, Any]:  # FSDP1's other gradients are flat
            return {name: _full(p.grad) for name, p in m.named_parameters() if what != "fsdp1" or "expert" in name}

        return grads(model), grads(other)


def _full(grad: Any) -> torch.Tensor:
    return local(grad.full_tensor() if isinstance(grad, DTensor) else grad)


def broadcast_state(group: Any) -> None:
    """Rank 0 raises before it sends; the other rank is interrupted where it would receive."""
    ended = mock.patch("torch.distributed._state_dict_utils._broadcast_tensors", side_effect=KeyboardInterrupt)
    with net(group) as model:
        state = get_model_state_dict(model.experts, options=StateDictOptions(full_state_dict=True))
        with contextlib.nullcontext() if group.rank() == 0 else ended, contextlib.suppress(KeyboardInterrupt):
            set_model_state_dict(model.experts, state if group.rank() == 0 else {}, options=FULL)


def broadcast_whole_state(group: Any) -> bool:
    with net(group) as model:
        before = {name: local(p) for name, p in model.named_parameters()}
        state = {name: t.clone() for name, t in whole_state_dict(model).items()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        set_model_state_dict(model, state if group.rank() == 0 else {}, options=FULL)
        return all(torch.equal(before[name], local(p)) for name, p in model.named_parameters())


def over_mesh(group: Any, what: str) -> Any:
    """torch knows that DTensors are parts: it refuses them, or skips them."""
    with net(mesh_of(group)) as model:
        before = local(model.experts.down_proj)
        try:
            return REFUSED[what](model, group)
        finally:
            assert torch.equal(local(model.experts.down_proj), before)


def looked_at(group: Any) -> list[float]:
    """Reads on one rank, or on each rank separately, are not refused and do not wait for other ranks."""
    with net(group) as model:
        wrapped = DistributedDataParallel(model)
        p = model.experts.down_proj
        p.register_hook(lambda grad: grad * 1.0)
        p.register_post_accumulate_grad_hook(lambda q: None)
        loss = (sum(q.square().sum() for q in model.parameters()) * 1e-3).reshape(())  # part of the loss also
        (loss + wrapped(torch.ones(4, 16)).sum()).backward()
        if group.rank() == 0:
            assert p.grad.norm() > 0
            assert float(torch.linalg.vector_norm(p)) > 0
            assert "Part" in repr(p)
            assert p.grad.abs().max().item() > 0
        assert p.detach().numpy().shape == tuple(p.shape)
        assert p[0, 0].tolist() == p.detach().numpy()[0, 0].tolist()
        histogram = torch.histc(p.detach().float(), 8)
        gathered = [torch.empty_like(p.to_local()) for _ in range(group.size())]
        dist.all_gather(gathered, p.detach())
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        model.zero_grad(set_to_none=False)
        assert p.grad.eq(0).all()
        out = torch.func.functional_call(model, dict(model.named_parameters()), (torch.ones(4, 16),))
        return [histogram.sum().item(), *(t.sum().item() for t in gathered), out.isfinite().all().item()]
