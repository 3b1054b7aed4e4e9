"""Ranks of a run: expert-parallel groups, and gradients averaged over them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from moe_rt.engine.gpu.driver import why_there_is_none
from moe_rt.errors import InvalidConfig
from moe_rt.nn.layer import MoELayer
from moe_rt.ops.tree_sums import tree_all_reduce


@contextmanager
def process_group(device: str, timeout_s: float) -> Iterator[None]:
    """Use the caller's process group, or make torchrun's or one of a single rank. A group made here is destroyed at the
    end.

    Raises:
        InvalidConfig: this rank has no GPU.
    """
    if device == "cuda":
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            why = why_there_is_none()
            raise InvalidConfig(f"device: got cuda for local rank {local_rank}, expected one of {count} GPUs{why}")
        torch.cuda.set_device(local_rank)
    if dist.is_initialized():
        yield
        return
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it undeclared
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def open_buffers(model: nn.Module) -> Iterator[None]:
    """Close the layers' buffers at the end; after an error abort them, so that no peer waits for this rank."""
    with ExitStack() as stack:
        for layer in moe_layers(model):
            stack.enter_context(layer.buffer)
        yield


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """Layers whose experts are spread over ranks."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


@dataclass(frozen=True)
class Ranks:
    """This rank's groups. Expert-parallel (ep) groups are contiguous ranks that together hold one set of experts. A
    data-parallel group of experts (edp) consists of the ranks, one of each ep group, that hold the same experts."""

    rank: int
    world_size: int
    ep_group: dist.ProcessGroup
    edp_group: dist.ProcessGroup

    @classmethod
    def make(cls, ep: int, device: str = "cpu") -> Ranks:
        """Make the groups. Collective; `ep` divides the world size."""
        world_size = dist.get_world_size()
        mesh = init_device_mesh(device, (world_size // ep, ep), mesh_dim_names=("edp", "ep"))
        return cls(dist.get_rank(), world_size, mesh.get_group("ep"), mesh.get_group("edp"))

    def share(self, count: int) -> range:
        """Return this rank's contiguous part of `count` items, which the world size divides."""
        each = count // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)


class Gradients:
    """Gradients of a model for a loss that is the sum of all ranks' parts.

    They are stored in two flat tensors, of which every parameter's `grad` is a view: one for parameters that all ranks
    hold, and one for this rank's experts. The experts' gradients arrive as sums over the tokens of the ep group.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        experts = [p for layer in moe_layers(model) for p in layer.experts.parameters()]
        local = {id(p) for p in experts}
        device = next(model.parameters()).device
        self._shared = _flat_gradient((p for p in model.parameters() if id(p) not in local), device)
        self._experts = _flat_gradient(experts, device)

    def zero(self) -> None:
        self._shared.zero_()
        self._experts.zero_()

    def add_up(self) -> None:
        """Turn them into the gradients of the global loss. Collective over the world."""
        tree_all_reduce(self._shared)
        tree_all_reduce(self._experts, self._ranks.edp_group)


def _flat_gradient(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Return a zero tensor, and make the gradients of these parameters views of it."""
    parameters = list(parameters)
    flat = torch.zeros(sum(p.numel() for p in parameters), device=device)
    for p, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = view.view_as(p)
    return flat
