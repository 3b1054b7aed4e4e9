"""Training with layers in chunks as users write it; each case returns what its rank saw."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from layer.cases_chunks import make_layer
from layer.cases_layer import HIDDEN, inputs_for
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe_rt import MoELayer
from moe_rt.errors import MoeRtError
from moe_rt.parallel import prepare


class Net(nn.Module):
    """Two layers after a linear one, perhaps with activation checkpointing."""

    def __init__(self, group: Any, num_chunks: int, recompute: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(make_layer(group, num_chunks) for _ in range(2))
        self.recompute = recompute
        with torch.no_grad():
            for p in self.first.parameters():
                p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view_as(p))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + self._run(layer, x)
        return x

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if not self.recompute:
            return layer(x)[0]  # type: ignore[no-any-return]
        return checkpoint(lambda x: layer(x)[0], x, use_reentrant=self.recompute == "reentrant")  # type: ignore

    def close(self) -> None:
        self.layers[0].buffer.close()  # type: ignore[union-attr,operator]


def plain_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.as_subclass(Tensor).clone() for name, p in model.named_parameters() if p.grad is not None}


def wrapped_steps(group: Any, num_chunks: int, recompute: str, micro: int, options: dict[str, Any]) -> list[Any]:
    """Return the gradients of three steps, each of some micro-batches."""
    model, seen = Net(group, num_chunks, recompute), []
    wrapped = DistributedDataParallel(prepare(model), **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for step in range(3):
        optimizer.zero_grad()
        for i in range(micro):
            with wrapped.no_sync() if i + 1 < micro else nullcontext():
                x = inputs_for(group.rank() + 2 * (micro * step + i), 9).requires_grad_()
                wrapped(x).square().mean().backward()
        seen.append(plain_gradients(model))
        optimizer.step()
    model.close()
    return seen


def in_wrapper(group: Any, recompute: str, micro: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return these gradients in three chunks, and in one chunk without options."""
    return wrapped_steps(group, 3, recompute, micro, options), wrapped_steps(group, 1, "", micro, {})


def scaled(group: Any) -> list[tuple[float, Tensor]]:
    """Return a GradScaler's scale and a weight after three steps, of which rank 0 overflows in one; see in_wrapper."""
    found = []
    for num_chunks in (1, 3):
        model = Net(group, num_chunks)
        wrapped = DistributedDataParallel(prepare(model))
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            loss = wrapped(inputs_for(group.rank() + 2 * step, 9)).square().mean()
            scaler.scale(loss * (torch.inf if step == 1 and group.rank() == 0 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((scaler.get_scale(), model.first.weight.detach().clone()))
        model.close()
    return found


def error_of(call: Callable[[], Any]) -> str:
    """Return the error's class and first line, or an empty text."""
    try:
        call()
    except (MoeRtError, ArithmeticError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def refused(group: Any) -> list[str]:
    """Return the errors of transforms that layers refuse, and of a step after each."""
    layer, x, texts = make_layer(group, 3), inputs_for(group.rank(), 9), []

    def run(x: Tensor) -> Tensor:
        return layer(x)[0]  # type: ignore[no-any-return]

    def second() -> None:
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(run(given).sum(), given, create_graph=True)
        grad.sum().backward()

    for call in (
        lambda: torch.func.grad(lambda x: run(x).sum())(x),
        lambda: torch.func.vjp(run, x)[1](x),
        lambda: torch.func.jacrev(run)(x),
        lambda: torch.vmap(run)(torch.stack([x, x])),
        second,
    ):
        texts += [error_of(call), error_of(lambda: run(x).sum().backward())]
    layer.buffer.close()
    return texts


def copied(group: Any) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return the output and gradients of a layer, of its deep copy and of its pickle."""
    layer, file, found = make_layer(group, 3), io.BytesIO(), []
    layer(inputs_for(group.rank(), 9))[0].sum().backward()
    layer.zero_grad()
    torch.save(layer, file)
    file.seek(0)
    for each in (layer, copy.deepcopy(layer), torch.load(file, weights_only=False)):
        y = each(inputs_for(group.rank(), 9))[0]
        y.square().sum().backward()
        assert each.config.num_chunks == 3
        found.append((y.detach(), plain_gradients(each)))
    layer.buffer.close()
    return found


def other_number(layer: MoELayer, num_chunks: int) -> None:
    layer.config = dataclasses.replace(layer.config, num_chunks=num_chunks)


def changed(group: Any) -> tuple[list[tuple[Tensor, Tensor]], str]:
    """Return outputs and gradients of numbers that all ranks change, also before a backward, and the error of numbers
    that differ."""
    layer, found = make_layer(group, 3), []
    for before, after in ((3, 3), (3, 1), (1, 2), (2, 2)):
        x = inputs_for(group.rank(), 9).requires_grad_()
        other_number(layer, before)
        y = layer(x)[0]
        other_number(layer, after)
        y.square().sum().backward()
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    other_number(layer, 1 if group.rank() == 0 else 2)
    text = error_of(lambda: layer(inputs_for(group.rank(), 9)))
    layer.buffer.close()
    return found, text


def after_evaluation(group: Any) -> list[Tensor]:
    """Return outputs of evaluation, of training after it, and of evaluation in the wrapper."""
    model, x = Net(group, 3).eval(), inputs_for(group.rank(), 9)
    with torch.inference_mode():
        found = [model(x).clone()]
    wrapped = DistributedDataParallel(prepare(model.train()), static_graph=True)
    y = wrapped(x)
    y.square().sum().backward()
    with torch.inference_mode():
        found += [y.detach(), wrapped(x).clone()]
    wrapped(x[: 0 if group.rank() == 1 else 9]).square().sum().backward()
    model.close()
    return found


def sharing(group: Any) -> list[list[Tensor]]:
    """Return the output and gradient of two layers that share a buffer, in chunks of different numbers and in one."""
    found = []
    for numbers in ((3, 2), (1, 1)):
        a, b = (make_layer(group, number) for number in numbers)
        assert a.buffer is b.buffer
        x = inputs_for(group.rank(), 9).requires_grad_()
        y = a(x)[0] + b(x)[0]
        z = b(y)[0] + a(y)[0]
        z.square().sum().backward()
        assert x.grad is not None
        found.append([z.detach(), x.grad])
        a.buffer.close()
    return found


def ended_backward(group: Any, how: str) -> list[str]:
    """A hook ends a backward while ops are under way, on all ranks or on rank 0. Return the errors of four steps."""
    layer, texts = make_layer(group, 3), []

    def end(_: Tensor) -> None:
        if how == "error":
            raise ZeroDivisionError("a mistake on purpose")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)  # until the signal arrives

    for step in range(4):
        hook = (
            layer.experts.down_proj.register_hook(end) if step == 1 and (how == "error" or not group.rank()) else None
        )
        texts.append(error_of(lambda: layer(inputs_for(group.rank(), 9).requires_grad_())[0].square().sum().backward()))
        if hook is not None:
            hook.remove()
    layer.buffer.close()
    return texts
