"""A layer's backward on every rank, with dispatch's backward in halves and whole; each case returns what differs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from layer.cases_layer import HIDDEN, config, inputs_for
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe_rt import MoELayer
from moe_rt.engine.cpu import CpuEngine
from moe_rt.errors import InvalidInput
from moe_rt.nn import overlap
from moe_rt.parallel import prepare

Grads = dict[str, Tensor | None]


def make_layer(group: Any, **changes: Any) -> MoELayer:
    """Return a layer whose weights do not depend on the threads' random numbers."""
    layer = MoELayer(config(**changes), group)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    return layer


@contextmanager
def seen_order(layer: MoELayer) -> Iterator[list[str]]:
    """Yield the list in which halves of ops, and the gradients of parameters, are noted."""
    seen: list[str] = []
    halves = {name: getattr(CpuEngine, name) for name in ("_run_first", "_run_second")}
    for name, half in halves.items():

        def noted(engine: CpuEngine, begun: Any, half: Callable[..., None] = half, name: str = name) -> None:
            seen.append(name)
            half(engine, begun)

        setattr(CpuEngine, name, noted)
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        for name, p in layer.named_parameters()
        if p.requires_grad
    ]
    yield seen
    for hook in hooks:
        hook.remove()
    for name, half in halves.items():
        setattr(CpuEngine, name, half)


class LowRank(nn.Module):
    """Frozen experts, and a trained change of low rank (LoRA)."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts.requires_grad_(False)
        self.a = nn.Parameter(torch.full((HIDDEN, 2), 0.1))
        self.b = nn.Parameter(torch.full((2, HIDDEN), 0.1))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        y, n = self.experts(x, offs), int(offs[-1])
        return torch.cat([y[:n] + x[:n] @ self.a @ self.b, y[n:]])


def run(layer: MoELayer, kind: str, x: Tensor) -> Tensor:
    """Run the layer's forward as `kind` says."""
    if kind == "checkpoint":
        return checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)  # type: ignore[no-any-return]
    if kind == "reentrant":
        return checkpoint(lambda x: layer(x)[0], x, use_reentrant=True)  # type: ignore[no-any-return]
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        y, aux = layer(x)
    return y + aux.loss


@contextmanager
def whole(really: bool | None) -> Iterator[None]:
    """Run dispatch's backward whole in this process if `really`, else in halves; None leaves it to the layer."""
    before = overlap.over_network
    if really is not None:
        overlap.over_network = lambda _: not really
    try:
        yield
    finally:
        overlap.over_network = before


def gradients(group: Any, kind: str, is_whole: bool | None, **changes: Any) -> tuple[Grads, list[str], Tensor]:
    """Return gradients of two accumulated passes, the order seen in the last one, and the output."""
    if kind == "shared":
        changes["shared_intermediate"] = 8
    if kind in ("biases", "split", "transposed"):
        changes |= {"biases": kind == "biases", "weight_layout": "hf" if kind == "biases" else kind}
    layer = make_layer(group, **changes)
    if kind == "frozen experts":
        layer.experts.requires_grad_(False)
    elif kind == "frozen router":
        layer.router.requires_grad_(False)
    elif kind == "one frozen weight":
        layer.experts.down_proj.requires_grad_(False)
    elif kind == "lora":
        layer.experts = LowRank(layer.experts)  # type: ignore[assignment]
    elif kind == "hook before experts in an adapter":
        layer.experts = LowRank(layer.experts)  # type: ignore[assignment]
        layer.experts.experts.register_full_backward_pre_hook(lambda *_: None)  # type: ignore[union-attr,operator]
    elif kind == "checkpoint of experts":
        layer.experts.forward = partial(checkpoint, layer.experts.forward, use_reentrant=False)  # type: ignore
    elif kind == "hook on the experts":
        layer.experts.register_full_backward_hook(lambda *_: None)
    x = inputs_for(group.rank(), 0 if kind == "no tokens" and group.rank() == 0 else 9)
    x.requires_grad_(kind != "no input gradient")
    with whole(is_whole), seen_order(layer) as seen:
        for _ in range(2):
            y = run(layer, kind, x)
            seen.clear()
            (y * y).sum().backward()
    grads: Grads = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    layer.buffer.close()
    return grads, seen, y.detach()


def both(group: Any, kind: str) -> tuple[Any, Any]:
    return gradients(group, kind, False), gradients(group, kind, True)


def by_itself(group: Any, route: str, num_chunks: int) -> tuple[Any, Any]:
    """Return what a layer does on this network, and with whole ops."""
    changes = {"route": route, "num_chunks": num_chunks, "num_experts": 4 * group.size()}
    return gradients(group, "shared", None, **changes), gradients(group, "shared", True, **changes)


def wrapped(group: Any, wrap: str) -> tuple[Grads, Grads]:
    """Return gradients under a wrapper of data parallelism, in halves and whole."""
    results = []
    for in_halves in (True, False):
        layer = prepare(make_layer(group))
        model = DistributedDataParallel(layer) if wrap == "ddp" else fully_shard(layer)
        with whole(not in_halves):
            for _ in range(2):
                y, _ = model(inputs_for(group.rank(), 9))
                (y * y).sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        results.append({name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()})
        layer.buffer.close()
    return results[0], results[1]


def one_weight(group: Any) -> tuple[Tensor, Tensor]:
    """Return a weight's gradient if no other one is asked for, and that of a whole backward."""
    layer = prepare(make_layer(group))
    loss = layer(inputs_for(group.rank(), 9))[0].square().sum()
    (alone,) = torch.autograd.grad(loss, layer.experts.down_proj, retain_graph=True)
    loss.backward()
    assert layer.experts.down_proj.grad is not None
    return alone.as_subclass(Tensor), layer.experts.down_proj.grad.as_subclass(Tensor)


def kept_tensors(group: Any, num_chunks: int, in_halves: bool) -> list[int]:
    """Return how many tensors exist after each of three backwards, and once its output is gone, without garbage
    collection."""
    layer = make_layer(group, num_chunks=num_chunks, shared_intermediate=8)
    counts = []
    gc.collect()
    gc.disable()
    try:
        with whole(not in_halves):
            for _ in range(3):
                x = inputs_for(group.rank(), 9).requires_grad_()
                y, _ = layer(x)
                y.square().sum().backward()
                x.grad = None
                counts.append(_num_tensors())
                del x, y, _
                counts.append(_num_tensors())
    finally:
        gc.enable()
    layer.buffer.close()
    return counts


def window_with_gradients(group: Any, num_chunks: int) -> str:
    """Return the error of a training forward whose input is a token window."""
    layer = make_layer(group, num_chunks=num_chunks)
    x = layer.buffer.token_window(9)
    x.copy_(inputs_for(group.rank(), 9))
    try:
        with whole(False):
            layer(x)
    except InvalidInput as error:
        return str(error)
    finally:
        layer.buffer.close()
    return "no error"


def _num_tensors() -> int:
    return sum(isinstance(found, Tensor) for found in gc.get_objects())


def raises_between(group: Any) -> list[str]:
    """A hook raises between the halves of rank 0's backward. Return the errors of this rank, one after the other."""
    layer, errors = make_layer(group), []
    if group.rank() == 0:
        layer.experts.down_proj.register_hook(_raise)
    for _ in range(2):
        try:
            with whole(False):
                y, _ = layer(inputs_for(group.rank(), 9).requires_grad_())
            (y * y).sum().backward()
        except (ValueError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    layer.buffer.close()
    return errors


def _raise(_: Tensor) -> None:
    raise ValueError("a mistake on purpose")
