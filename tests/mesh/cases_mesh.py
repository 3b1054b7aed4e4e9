"""A small decoder whose mixtures are on meshes, and functions that ranks run in the mesh tests."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from moe_rt import MoEConfig, MoELayer
from moe_rt.parallel.checkpoint import check_checkpoint
from moe_rt.parallel.clip import clip_grad_norm_
from moe_rt.parallel.wrapping import shard_experts
from moe_rt.train import TrainConfig
from moe_rt.train.model import Decoder
from moe_rt.train.parallel import moe_layers

SEQUENCES, LENGTH, STEPS = 8, 16, 3


def moe_config(**changes: Any) -> MoEConfig:
    fields: dict[str, Any] = dict(
        hidden=32, intermediate=24, num_experts=8, num_topk=2, num_max_tokens_per_rank=SEQUENCES * LENGTH,
        aux_loss_coef=0.1, z_loss_coef=0.01,
    )  # fmt: skip
    return MoEConfig(**{**fields, **changes})


def decoder(group: Any, **changes: Any) -> Decoder:
    """Return a decoder with the same global weights for every group."""
    torch.manual_seed(11)
    sizes = TrainConfig(hidden=32, num_heads=2, num_layers=2, seq_len=LENGTH, tie_embeddings=False)
    return Decoder(sizes, lambda _: MoELayer(moe_config(**changes), group))


def close(model: nn.Module) -> None:
    for layer in moe_layers(model):
        layer.buffer.close()


def ep_mesh(efsdp: int, ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (efsdp, ep), mesh_dim_names=("efsdp", "ep"))


def fsdp_decoder(efsdp: int, ep: int, *, over_mesh: bool = True, **changes: Any) -> Decoder:
    mesh = ep_mesh(efsdp, ep)
    model = decoder(mesh["ep"] if over_mesh else mesh.get_group("ep"), **changes)
    dense = init_device_mesh("cpu", (efsdp * ep,), mesh_dim_names=("dp",))
    shard_experts(model, mesh["efsdp"])
    for block in model.layers:
        fully_shard(block, mesh=dense)
    return fully_shard(model, mesh=dense)


def mixed_precision(
    group: Any, experts: dict[str, Any], others: dict[str, Any], over_mesh: bool
) -> tuple[list[float], set[torch.dtype]]:
    """Return losses under FSDP's policies, given as fields of MixedPrecisionPolicy, and the dtypes of rows."""
    mesh = ep_mesh(2, group.size() // 2)
    model = decoder(mesh["ep"] if over_mesh else mesh.get_group("ep"))
    dense = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("dp",))
    shard_experts(model, mesh["efsdp"], mp_policy=MixedPrecisionPolicy(**experts))
    assert not any("held_experts" in name for name in model.state_dict())  # a shard is not a rank's block of experts
    for block in model.layers:
        fully_shard(block, mesh=dense, mp_policy=MixedPrecisionPolicy(**others))
    fully_shard(model, mesh=dense, mp_policy=MixedPrecisionPolicy(**others))
    try:
        losses, _ = train_steps(model, group.rank(), group.size())
        return losses, {layer.buffer.spec.dtype for layer in moe_layers(model)}
    finally:
        close(model)


def loss_of(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> Tensor:
    """Return the mean loss over this rank's part of the step's batch."""
    tokens = torch.randint(256, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(world)[rank]
    out = model(mine[:, :-1])
    return F.cross_entropy(out.logits.flatten(0, 1), mine[:, 1:].flatten()) + out.aux_loss


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def train_steps(model: nn.Module, rank: int, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return global losses and parameters of AdamW steps; the model averages its gradients over ranks."""
    # eps is large because AdamW's first steps are otherwise the signs of gradients, rounding included.
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


def fsdp_steps(group: Any, efsdp: int, ep: int, changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Run train_steps under FSDP; return also the number of expert elements that this rank keeps."""
    model = fsdp_decoder(efsdp, ep, **changes)
    kept = sum(p.to_local().numel() for name, p in model.named_parameters() if ".experts." in name)
    result = train_steps(model, group.rank(), group.size())
    close(model)
    return *result, kept


def single_steps(changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = decoder(None, **changes)
    result = train_steps(model, 0, 1)
    close(model)
    return result


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def averaged_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world: int) -> float:
    """Run a step of a model whose ranks form one ep group and whose gradients are those of each rank's loss."""
    loss = loss_of(model, step, rank, world)
    loss.backward()
    average(model, world)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    if world > 1:
        dist.all_reduce(total)
    return total.item() / world


def average(model: nn.Module, world: int) -> None:
    """Average gradients over ranks that form one ep group: those of experts are sums already."""
    for name, p in model.named_parameters():
        if ".experts." not in name and world > 1:
            dist.all_reduce(p.grad)
        p.grad /= world


def save_then_step(group: Any, path: str, changes: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    """Run two steps on a mesh, a checkpoint, two more steps; return the saved parameters and the later losses."""
    model = decoder(ep_mesh(1, group.size())["ep"], balance_bias=True, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(2):
        averaged_step(model, optimizer, step, group.rank(), group.size())
    for layer in moe_layers(model):
        layer.router.update_bias(torch.arange(layer.config.num_experts))
    dcp.save(state_of(model, optimizer), checkpoint_id=path)
    saved = full(get_model_state_dict(model))
    losses = [averaged_step(model, optimizer, step, group.rank(), group.size()) for step in (2, 3)]
    close(model)
    return saved, losses


def load_then_step(group: Any, path: str, changes: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    """Load into a model with other weights; return the loaded parameters and the losses of the next steps."""
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    model = decoder(None if group is None else ep_mesh(1, world)["ep"], balance_bias=True, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    try:
        check_checkpoint(model, path)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loaded = full(get_model_state_dict(model))
        return loaded, [averaged_step(model, optimizer, step, rank, world) for step in (2, 3)]
    finally:
        close(model)


def clipped(group: Any, kind: str) -> tuple[float, float]:
    """Return the norm of the first step's gradients, and the norm after clipping to 0.1."""
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    if kind.startswith("fsdp"):
        model: nn.Module = fsdp_decoder(2, 2, over_mesh=kind == "fsdp")
    else:
        model = decoder(ep_mesh(1, world)["ep"] if kind == "mesh" else group)
    loss_of(model, 0, rank, world).backward()
    if not kind.startswith("fsdp"):
        average(model, world)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    clip_grad_norm_(model, 1e3)  # much larger than the norm, so that not a bit changes
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    for grad, was in zip(kept, grads, strict=True):
        local = (t.to_local() if isinstance(t, DTensor) else t for t in (grad, was))
        assert torch.equal(*local)
    before, after = clip_grad_norm_(model, 0.1), clip_grad_norm_(model, 0.1)
    close(model)
    return before.item(), after.item()


def clipped_by_hand(group: Any) -> list[float]:
    """Clip a sharded gradient [4, 4], one over a second mesh [5, 5] and a partial one whose sum is [3, 3]; return the
    norm and the gradients.
    """
    mesh, other_mesh = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    sharded = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
    sharded.grad = DTensor.from_local(torch.full((1,), 4.0), mesh, [Shard(0)])
    elsewhere = nn.Parameter(DTensor.from_local(torch.zeros(1), other_mesh, [Shard(0)] * 2))
    elsewhere.grad = DTensor.from_local(torch.full((1,), 5.0), other_mesh, [Shard(0)] * 2)
    replicated = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    replicated.grad = DTensor.from_local(torch.full((2,), 1.5), mesh, [Partial()])
    frozen, unused = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
    model = nn.Module()
    parameters = dict(sharded=sharded, replicated=replicated, elsewhere=elsewhere, frozen=frozen, unused=unused)
    for name, p in parameters.items():
        model.register_parameter(name, p)
    norm = clip_grad_norm_(model, 1.0).item()
    return [norm, *(x for p in (sharded, replicated, elsewhere) for x in p.grad.full_tensor().tolist())]


def clipped_without(group: Any, what: str) -> float:
    """Return the norm if rank 1 has no gradients of its experts, or none at all."""
    few = dist.new_group(timeout=timedelta(seconds=120))  # a rank that calls fewer collectives fails
    layer = MoELayer(moe_config(), few)
    for name, p in layer.named_parameters():
        if group.rank() == 0 or not (what == "everything" or "experts" in name):
            p.grad = torch.ones_like(p)
    spread = [p.grad for name, p in layer.named_parameters() if "experts" in name and p.grad is not None]
    assert bool(spread) == (group.rank() == 0)
    norm = clip_grad_norm_(layer, 1e9).item()
    close(layer)
    return norm if what == "experts" else float(norm > 0)


def clipped_threads(group: Any) -> None:
    layer = MoELayer(moe_config(), group)
    try:
        clip_grad_norm_(layer, 1.0)
    finally:
        layer.buffer.close()


def on_mesh_and_group(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return this rank's loss and gradients with DTensors, and with plain tensors."""
    results = []
    for where in (ep_mesh(1, group.size())["ep"], group):
        model = decoder(where)
        loss = loss_of(model, 0, group.rank(), group.size())
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        assert all(isinstance(g, DTensor) == (".experts." in name and where is not group) for name, g in grads.items())
        local = {name: g.to_local() if isinstance(g, DTensor) else g for name, g in grads.items()}
        results.append({"loss": loss.detach(), **local})
        close(model)
    return results[0], results[1]


def initial(group: Any) -> dict[str, Tensor]:
    torch.manual_seed(42)
    layer = MoELayer(moe_config(), ep_mesh(1, group.size())["ep"])
    layer.buffer.close()
    return full(layer.state_dict())


def refused(group: Any, ranks: Any, changes: dict[str, Any]) -> None:
    MoELayer(moe_config(**changes), DeviceMesh("cpu", ranks))


def refused_on_one(group: Any) -> None:
    MoELayer(moe_config(num_experts=8 - group.rank()), ep_mesh(1, 2)["ep"])


def reset_after_sharding(group: Any) -> None:
    mesh = ep_mesh(2, 1)
    layer = MoELayer(moe_config(), mesh["ep"])
    shard_experts(layer, mesh["efsdp"])
    layer.buffer.close()
    layer.reset_parameters()


def save_fsdp(group: Any, path: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    model = fsdp_decoder(2, 2, **changes)
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=path)
    close(model)
    return full(state)


def load_fsdp(group: Any, path: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Load into zeros, on a mesh of four ranks or, without a group, in one process."""
    model = decoder(None, **changes) if group is None else fsdp_decoder(4, 1, **changes)
    state = get_model_state_dict(model)
    for tensor in state.values():
        tensor.zero_()
    check_checkpoint(model, path)
    dcp.load({"model": state}, checkpoint_id=path)
    close(model)
    return full(state)
