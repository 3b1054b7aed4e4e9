"""A small decoder whose mixtures lie on meshes, and what ranks do in the mesh tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moe_rt import MoEConfig, MoELayer
from moe_rt.clip import clip_grad_norm_
from moe_rt.errors import InvalidConfig
from moe_rt.parallel import shard_experts
from moe_rt.train import TrainConfig
from moe_rt.train.model import Decoder

SEQUENCES, LENGTH, STEPS = 8, 16, 3


def moe_config(**changes: Any) -> MoEConfig:
    fields: dict[str, Any] = dict(
        hidden=32, intermediate=24, num_experts=8, num_topk=2, num_max_tokens_per_rank=SEQUENCES * LENGTH,
        aux_loss_coef=0.1, z_loss_coef=0.01,
    )  # fmt: skip
    return MoEConfig(**{**fields, **changes})


def decoder(group: Any, **changes: Any) -> Decoder:
    """The same global weights whatever the group."""
    torch.manual_seed(11)
    sizes = TrainConfig(hidden=32, num_heads=2, num_layers=2, seq_len=LENGTH, tie_embeddings=False)
    return Decoder(sizes, lambda _: MoELayer(moe_config(**changes), group))


def close(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.buffer.close()


def ep_mesh(efsdp: int, ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (efsdp, ep), mesh_dim_names=("efsdp", "ep"))


def fsdp_decoder(efsdp: int, ep: int, **changes: Any) -> Decoder:
    mesh = ep_mesh(efsdp, ep)
    model = decoder(mesh["ep"], **changes)
    dense = init_device_mesh("cpu", (efsdp * ep,), mesh_dim_names=("dp",))
    shard_experts(model, mesh["efsdp"])
    for block in model.layers:
        fully_shard(block, mesh=dense)
    return fully_shard(model, mesh=dense)


def loss_of(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> Tensor:
    """The mean over this rank's part of the step's batch."""
    tokens = torch.randint(256, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(world)[rank]
    out = model(mine[:, :-1])
    return F.cross_entropy(out.logits.flatten(0, 1), mine[:, 1:].flatten()) + out.aux_loss


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def train_steps(model: nn.Module, rank: int, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """Global losses and parameters of AdamW steps; the model averages its own gradients over ranks."""
    # A large eps, for the first steps of AdamW otherwise are the signs of gradients, rounding included.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, rank, world)
        loss.backward()
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses, full(dict(model.named_parameters()))


def fsdp_steps(group: Any, efsdp: int, ep: int, changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = fsdp_decoder(efsdp, ep, **changes)
    result = train_steps(model, group.rank(), group.size())
    close(model)
    return result


def single_steps(changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = decoder(None, **changes)
    result = train_steps(model, 0, 1)
    close(model)
    return result
