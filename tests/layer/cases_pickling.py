"""Functions that ranks run with layers that were pickled, and a process that is given one."""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from layer.cases_layer import config, inputs_for
from torch import Tensor, nn

from moe_rt import MoELayer
from moe_rt.errors import InvalidConfig


def model(group: Any = None) -> nn.Sequential:
    """Return two layers that share a buffer."""
    torch.manual_seed(0)
    layers = [MoELayer(config(), group) for _ in range(2)]
    return nn.Sequential(*layers)


def step(layers: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    for layer in layers:
        x, _ = layer(x)
    x.square().sum().backward()
    grads = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    return [x.detach(), *grads]


def saved(layers: nn.Sequential) -> bytes:
    file = io.BytesIO()
    torch.save(layers, file)
    return file.getvalue()


def loaded(data: bytes) -> nn.Sequential:
    return torch.load(io.BytesIO(data), weights_only=False)


def of_the_default_group(group: Any) -> None:
    """Loaded layers give the same output and gradients, on a buffer shared with each other and with new layers."""
    layers, x = model(group), inputs_for(group.rank(), 7)
    expected = step(layers, x)
    again = loaded(saved(layers))
    del layers
    torch.testing.assert_close(step(again, x), expected, rtol=0, atol=0)
    assert again[0].buffer is again[1].buffer
    new = MoELayer(config(), group)
    assert new.buffer is again[0].buffer
    assert new.tag not in (again[0].tag, again[1].tag)
    assert [layer.metrics.snapshot().forwards for layer in again] == [2, 2]


def clipped(group: Any) -> tuple[float, float]:
    """Return the norm that torch's clip finds for equal gradients, before and after the model was pickled."""
    x, norms = inputs_for(group.rank(), 7), []
    layers = model(group)
    for each in (layers, loaded(saved(layers))):
        out, _ = each[0](x)
        out.square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(each[0].experts.parameters(), 1.0)))
    return norms[0], norms[1]


def of_another_rank(group: Any) -> str:
    """Rank 1 loads what rank 0 saved."""
    files: list[Any] = [saved(model(group))]
    dist.broadcast_object_list(files, 0, group)
    try:
        step(loaded(files[0]), inputs_for(group.rank(), 7))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(group: Any, over: str) -> str:
    if over == "own group":
        group = dist.new_group(list(range(group.size())))
    try:
        saved(model(group))
    except InvalidConfig as error:
        return str(error)
    return "no error"


def child(pipe: Connection, layers: nn.Sequential) -> None:
    """Run a step in a spawned process, which received the layers as a pickle."""
    x = pipe.recv()
    pipe.send([t.tolist() for t in step(layers, x)])


def without_a_group(data: bytes) -> str:
    layers = pickle.loads(data)
    try:
        layers[0].buffer  # noqa: B018
    except InvalidConfig as error:
        return str(error)
    return "no error"


def given_away(group: Any) -> bytes:
    return pickle.dumps(model(group))
