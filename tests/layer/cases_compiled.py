"""Functions that ranks run in test_compiled.py: compiled models with layers in series, in parallel and checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from layer.cases_layer import HIDDEN, config, inputs_for
from torch import Tensor, nn
from torch._inductor.config import patch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_rt import Buffer, MoELayer


class Model(nn.Module):
    """Two MoE layers and two linear ones; `shape` is the forward that combines them."""

    def __init__(self, group: Any, shape: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = MoELayer(config(), group), MoELayer(config(), group)
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.shape = shape

    @property
    def buffer(self) -> Buffer:
        return self.one.buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.shape(self, x)

    def ops(self, x: Tensor, layer: MoELayer) -> Tensor:
        """Run a layer's ops, without its router and its counters."""
        weights, idx = x[:, :7].softmax(-1).topk(3)
        recv_x, recv_weights, handle = self.buffer.dispatch(x, idx, weights)
        return self.buffer.combine(layer.experts(recv_x, handle.offs), recv_weights, handle)


def one_after_the_other(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    h = h + m.one(h)[0]
    return m.b(h + m.two(h)[0])


def side_by_side_and_twice(m: Model, x: Tensor) -> Tensor:
    """No layer needs another's output, and one runs twice."""
    return m.one(m.a(x))[0] + 2 * m.two(torch.tanh(m.b(x)))[0] + 3 * m.one(torch.tanh(m.a(x)))[0]


def experts_that_backward_repeats(m: Model, x: Tensor) -> Tensor:
    """Checkpoint experts but keep the ops' outputs, as in docs/autograd.md."""
    ops = [torch.ops.moe_rt.dispatch.default, torch.ops.moe_rt.combine.default]
    keep_ops = partial(create_selective_checkpoint_contexts, ops)
    h = x + checkpoint(m.ops, m.a(x), m.one, use_reentrant=False, context_fn=keep_ops)
    return m.b(h + checkpoint(m.ops, torch.tanh(h), m.two, use_reentrant=False, context_fn=keep_ops))


SHAPES = (one_after_the_other, side_by_side_and_twice, experts_that_backward_repeats)


@patch(force_disable_caches=True)  # other versions of the ops may have left graphs in this disk's cache
def worst_difference(group: Any, shape: Callable[[Model, Tensor], Tensor], num_tokens: list[int]) -> float:
    """Return the largest difference between compiled and eager outputs and gradients, on num_tokens[rank] tokens."""
    torch._dynamo.reset()
    x = inputs_for(group.rank(), num_tokens[group.rank()])
    seen = []
    for compiles in (True, False):
        model = Model(group, shape)
        out = (torch.compile(model, fullgraph=True) if compiles else model)(x)
        out.square().sum().backward()
        seen.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    model.buffer.close()
    return max(float((a - b).abs().max()) for a, b in zip(*seen, strict=True) if len(a))


@patch(force_disable_caches=True)
def written_outputs(group: Any, num_tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return the errors of two outputs that independent combines of one compiled graph write in place."""
    torch._dynamo.reset()
    x = inputs_for(group.rank(), num_tokens[group.rank()])
    outs = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    weights, idx = x[:, :7].softmax(-1).topk(3)
    with Buffer(group, **config().buffer_sizes()) as buffer, torch.no_grad():

        @torch.compile(fullgraph=True)
        def exchange(x: Tensor, one: Tensor, two: Tensor) -> None:
            for scale, out in ((2, one), (3, two)):
                recv_x, recv_weights, handle = buffer.dispatch(x * scale, idx, weights)
                buffer.combine(recv_x, recv_weights, handle, out=out)

        exchange(x, *outs)
    total = weights.sum(1, keepdim=True)
    return outs[0] - 2 * total * x, outs[1] - 3 * total * x
