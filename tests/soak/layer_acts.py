"""The soak's acts on a layer: random configs and modes, against a layer of one rank that has all experts."""

from __future__ import annotations

import random
from typing import Any

import torch
from soak.buffer_acts import EVALUATION
from torch import Tensor

from moe_rt import MoEConfig, MoELayer, ThreadGroup

# Relative to the norm: partial sums are rounded when they are sent, and products have other blocks.
TOLERANCE = {None: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2}
HIDDEN = (16, 40)


def draw_config(draw: random.Random, num_ranks: int) -> MoEConfig:
    """Draw any sizes and choices with capacity for every row."""
    activation = draw.choice(["swiglu", "swiglu", "relu2", "clamped_swiglu"])
    softmax = draw.random() < 0.7
    num_experts = draw.randint(max(2, num_ranks), 9)
    return MoEConfig(
        hidden=draw.choice(HIDDEN),
        intermediate=draw.choice([8, 24]),
        num_experts=num_experts,
        num_topk=draw.randint(1, min(3, num_experts)),
        num_max_tokens_per_rank=draw.randint(1, 12),
        dtype=draw.choice(list(TOLERANCE)),
        score_func="softmax" if softmax else "sigmoid",
        topk_before_softmax=softmax and draw.random() < 0.5,
        norm_topk=draw.random() < 0.7,
        router_bias=draw.random() < 0.3,
        activation=activation,
        weight_layout=draw.choice(["hf", "transposed", "split"]),
        biases=draw.random() < 0.5,
        shared_intermediate=draw.choice([None, None, 8]),
        aux_loss_coef=draw.choice([0.0, 0.1]),
        num_chunks=draw.choice([1, 1, 2, 3]),
        overflow="retry",
        capacity_factor=draw.choice([None, 0.5]),
        timeout_s=60.0,
    )


def make_layers(config: MoEConfig, group: Any, seed: int) -> tuple[MoELayer, MoELayer]:
    """Return the group's layer, and a one-rank layer with the same global weights."""
    layers = []
    for where in (group, ThreadGroup.make(1)[0]):
        torch.manual_seed(seed)
        layers.append(MoELayer(config, where))
    return layers[0], layers[1]


def verified_step(layer: MoELayer, alone: MoELayer, draw: random.Random, compiled: bool) -> None:
    """Verify training, or evaluation in some mode. Compiled means traced by Dynamo, without its code generator."""
    mode, seed = draw.choice(["train", "train", *EVALUATION]), draw.randrange(2**31)
    rank, tolerance = layer.buffer.rank, TOLERANCE[layer.config.dtype]
    num_tokens = [draw.randint(0, layer.config.num_max_tokens_per_rank) for _ in range(layer.buffer.num_ranks)]
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(n, layer.config.hidden, generator=g) for n in num_tokens]
    run: Any = layer
    if compiled:
        torch.compiler.reset()  # the compiler keeps its traces of earlier layers, and stops after eight
        run = torch.compile(layer, backend="eager")
    if mode != "train":
        with EVALUATION[mode](), torch.no_grad():
            close("out", run(xs[rank])[0], alone(xs[rank])[0], 5e-2 if mode == "autocast" else tolerance)
        return
    layer.zero_grad(), alone.zero_grad()
    mine, own = (xs[rank].clone().requires_grad_() for _ in range(2))
    close("out", _backward(run, mine), _backward(alone, own), tolerance)
    close("grad of x", mine.grad, own.grad, tolerance)
    for name, parameter in layer.router.named_parameters():
        close(f"grad of the router's {name}", parameter.grad, alone.router.get_parameter(name).grad, tolerance)
    for peer, x in enumerate(xs):
        if peer != rank:
            _backward(alone, x)
    for name, parameter in layer.experts.named_parameters():
        expected = alone.experts.get_parameter(name).grad
        close(f"grad of the experts' {name}", parameter.grad, expected[layer.expert_ids], tolerance)


def _backward(layer: Any, x: Tensor) -> Tensor:
    out, aux = layer(x)
    ((out * torch.linspace(-1, 1, x.shape[1])).sum() + aux.loss).backward()
    return out.detach()


def close(name: str, got: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert got is not None
    assert expected is not None, f"{name}: nothing to compare with"
    difference, norm = float((got - expected).norm()), float(expected.norm())
    assert difference <= tolerance * norm + 1e-6, f"{name}: got a difference of {difference}, its norm is {norm}"
