"""Functions that ranks run in the tests of data parallelism: a decoder in common wrappers, and its weights."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh.cases_mesh import LENGTH, SEQUENCES, close, decoder, ep_mesh, full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moe_rt.parallel import clip
from moe_rt.parallel.wrapping import expert_parameters, prepare, shard_experts
from moe_rt.train.parallel import moe_layers

STEPS = 5


def parts(step: int, rank: int, world: int, micro: int) -> list[Tensor]:
    """Return this rank's micro-batches of a step's batch, one of three, independent of the number of ranks."""
    tokens = torch.randint(256, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step % 3))
    return list(tokens.chunk(world)[rank].chunk(micro))


def backward(model: nn.Module, batches: list[Tensor], no_sync: bool = False) -> Tensor:
    loss = torch.zeros(())
    for i, tokens in enumerate(batches):
        with model.no_sync() if no_sync and i + 1 < len(batches) else contextlib.nullcontext():
            out = model(tokens[:, :-1])
            part = F.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten()) + out.aux_loss
            (part / len(batches)).backward()
        loss += part.detach() / len(batches)
    return loss


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the global tensors, by names without the wrappers' prefixes."""
    spread = {p: layer for layer in moe_layers(model) for p in layer.experts.parameters()}
    tensors = full(dict(model.named_parameters()))
    for name, p in model.named_parameters():
        layer = spread.get(p)
        if layer is not None and layer.buffer.num_ranks > 1 and tensors[name].shape[0] != layer.config.num_experts:
            gathered = tensors[name].new_empty(layer.config.num_experts, *p.shape[1:])
            dist.all_gather_into_tensor(gathered, tensors[name], group=layer.buffer.process_group)
            tensors[name] = gathered
    return {bare(name): t for name, t in tensors.items()}


def bare(name: str) -> str:
    return name.replace("module.", "").replace("_orig_mod.", "")


def optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    # eps is large because AdamW's first steps are otherwise the signs of gradients, rounding included.
    options: dict[str, Any] = dict(lr=1e-2, eps=1e-4)
    if kind != "zero":
        return [torch.optim.AdamW(model.parameters(), **options, **({kind: True} if kind else {}))]
    experts = expert_parameters(model)
    others = [p for p in model.parameters() if id(p) not in set(map(id, experts))]
    zero = ZeroRedundancyOptimizer(others, torch.optim.AdamW, **options)
    return [zero, torch.optim.AdamW(experts, **options)]


def train(model: nn.Module, rank: int, world: int, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses over all ranks, and all weights at the end."""
    stepping, losses = optimizers(model, how.get("optimizer", "")), []
    for step in range(STEPS):
        loss = backward(model, parts(step, rank, world, how.get("micro", 1)), how.get("no_sync", False))
        if how.get("clip") == "torch":
            clip_grad_norm_(model.parameters(), 0.3, norm_type=how.get("norm", 2.0), foreach=how.get("foreach"))
        elif how.get("clip"):
            clip.clip_grad_norm_(model, 0.3)
        for optimizer in stepping:
            optimizer.step()
            optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / world)
    return losses, whole(model)


def alone(how: dict[str, Any], changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process with the whole batch."""
    model = decoder(None, **changes)
    try:
        return train(model, 0, 1, clip=how.get("clip"), norm=how.get("norm", 2.0))
    finally:
        close(model)


def place(group: Any, ep: int, over_mesh: bool = False) -> Any:
    """Return this rank's expert-parallel group, of contiguous ranks."""
    mesh = ep_mesh(group.size() // ep, ep)
    return mesh["ep"] if over_mesh else mesh.get_group("ep")


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(prepare(model), **options)


def ddp_steps(group: Any, ep: int, how: dict[str, Any], changes: dict[str, Any]) -> Any:
    model = decoder(place(group, ep, how.get("mesh", False)), **changes)
    if how.get("seeds"):  # groups start with different weights: the first group's must win
        with torch.no_grad():
            for p in model.parameters():
                (p.to_local() if hasattr(p, "to_local") else p).mul_(1 + group.rank() // ep)
    wrapped = ddp(model, **how.get("ddp", {}))
    if how.get("compile"):
        wrapped = torch.compile(wrapped, backend="aot_eager")
    try:
        return train(wrapped, group.rank(), group.size(), **how)
    finally:
        close(model)


def fsdp_steps(group: Any, ep: int, how: dict[str, Any]) -> Any:
    """Train with FSDP2 around experts that `prepare` excluded, or that `shard_experts` shards."""
    mesh = ep_mesh(group.size() // ep, ep)
    everyone = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("dp",))
    model = decoder(mesh["ep"] if how.get("mesh") else mesh.get_group("ep"))
    if how.get("shard"):
        shard_experts(model, mesh["efsdp"])
    else:
        prepare(model, everyone)
    for block in model.layers:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    try:
        return train(model, group.rank(), group.size(), **how)
    finally:
        close(model)


def in_pairs(group: Any) -> list[list[Tensor]]:
    """Return the gradients of a pair's experts before and after `prepare` with that pair of a larger world."""
    pair = place(group, 2)
    model, grads = decoder(pair), []
    for change in (lambda: None, lambda: prepare(model, pair)):
        change()
        backward(model, parts(0, pair.rank(), 2, 1))
        grads.append([p.grad.to_local().clone() for layer in moe_layers(model) for p in layer.experts.parameters()])
        model.zero_grad()
    close(model)
    return grads


def averages(group: Any, over: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return an exponential moving average of weights, by torch and by hand."""
    model = ddp(decoder(group))
    source = model if over == "ddp" else model.module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ema = AveragedModel(source, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    [optimizer] = optimizers(model, "")
    by_hand: dict[str, Tensor] = {}
    try:
        for step in range(3):
            backward(model, parts(step, group.rank(), group.size(), 1))
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(source)
            for name, p in source.named_parameters():
                by_hand[bare(name)] = p.detach().clone() if step == 0 else by_hand[bare(name)].lerp(p.detach(), 0.5)
        ema(parts(0, group.rank(), group.size(), 1)[0][:, :-1])
        return {bare(name): p.detach() for name, p in ema.named_parameters()}, by_hand
    finally:
        close(model)


def copied(group: Any) -> tuple[Any, Any]:
    """Return gradients of a prepared model and of its copy, each in a separate wrapper."""
    model = prepare(decoder(group))
    grads = []
    for m in (model, copy.deepcopy(model)):
        wrapped = DistributedDataParallel(m)
        backward(wrapped, parts(0, group.rank(), group.size(), 1))
        norm = clip_grad_norm_(m.parameters(), 1e9)
        grads.append({"norm": norm, **{name: p.grad for name, p in m.named_parameters()}})
    close(model)
    return grads[0], grads[1]


def norms(group: Any, how: str) -> tuple[float, float]:
    """Return torch's norm and moe_rt's of a model whose parameters were replaced."""
    model = prepare(decoder(group))
    if how == "assign":
        model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    elif how == "bf16":
        model.to(torch.bfloat16).to(torch.float32)
    wrapped = DistributedDataParallel(model)
    backward(wrapped, parts(0, group.rank(), group.size(), 1))
    ours, theirs = clip.clip_grad_norm_(model, 1e9), clip_grad_norm_(wrapped.parameters(), 1e9)
    close(model)
    return theirs.item(), ours.item()


def kinds(group: Any) -> list[tuple[float, float]]:
    """Return norms of every kind by torch, of parameters and of a generator of gradients, and of the whole gradient."""
    model = prepare(decoder(group))
    backward(DistributedDataParallel(model), parts(0, group.rank(), group.size(), 1))
    experts = {id(p) for p in expert_parameters(model)}
    flat = []
    for p in model.parameters():
        pieces = [torch.empty_like(p.grad) for _ in range(group.size())]
        dist.all_gather(pieces, p.grad.contiguous())
        flat += [t.flatten() for t in (pieces if id(p) in experts else pieces[:1])]
    results = []
    for kind in (2.0, 1.0, 3.0, float("inf"), float("-inf")):
        expected = torch.linalg.vector_norm(torch.cat(flat), kind).item()
        for foreach in (False, True):
            got = clip_grad_norm_(model.parameters(), 1e9, norm_type=kind, foreach=foreach)
            results.append((got.item(), expected))
        results.append((get_total_norm((p.grad for p in model.parameters()), kind).item(), expected))
    close(model)
    return results


def compiled_update(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights after an optimizer's step, eager and compiled."""
    results = []
    for compiled in (False, True):
        model = ddp(decoder(group))
        [optimizer] = optimizers(model, "foreach")
        backward(model, parts(0, group.rank(), group.size(), 1))
        (torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step)()
        results.append(whole(model))
        close(model)
    return results[0], results[1]
