"""A block of attention and mixture, and functions that ranks run with it: checkpointing, micro-batches, compilation."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from layer.cases_layer import config, inputs_for
from support.ranks import CASE_TIMEOUT_S
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from moe_rt import Buffer, MoELayer
from moe_rt.train import TrainConfig
from moe_rt.train.model import Block

HIDDEN, LENGTH = 16, 16


class MoeBlock(Block):
    """A block whose mixture uses `buffer`."""

    def forward(self, x: Tensor, buffer: Buffer | None = None) -> tuple[Tensor, Any]:
        x = x + self.attention(self.attention_norm(x))
        y, aux = self.moe(self.moe_norm(x), buffer=buffer)
        return x + y, aux


def block(group: Any, **changes: Any) -> MoeBlock:
    generator = torch.Generator().manual_seed(5)
    sizes = TrainConfig(hidden=HIDDEN, num_heads=2, seq_len=LENGTH)
    made = MoeBlock(sizes, MoELayer(config(num_max_tokens_per_rank=4 * LENGTH, **changes), group))
    with torch.no_grad():  # ranks that are threads share the global RNG
        for name, p in made.named_parameters():
            if ".experts." not in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        for local, expert in enumerate(made.moe.expert_ids):
            made.moe.experts.reset_expert(local, torch.Generator().manual_seed(expert))
    return made


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return grads


def loss_of(out: Tensor, aux: Any) -> Tensor:
    """Return the mean over sequences."""
    return (out * torch.linspace(-1, 1, HIDDEN)).sum((1, 2)).mean() + aux.loss


def checkpointed(group: Any, num_tokens: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Return outputs and gradients without and with activation checkpointing, and the count of forwards."""
    model, results = block(group), []
    for recompute in (False, True):
        x = inputs_for(group.rank(), num_tokens[group.rank()]).unsqueeze(0).requires_grad_()
        out, aux = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        loss_of(out, aux).backward()
        results.append({"out": out.detach(), "x": x.grad, **gradients(model)})
    forwards = model.moe.metrics.snapshot().forwards
    model.moe.buffer.close()
    return *results, forwards


def accumulated(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients of one batch of four sequences, and their sum over its micro-batches."""
    model, results = block(group), []
    x = inputs_for(group.rank(), 4 * LENGTH).unflatten(0, (4, LENGTH))
    for num_micro in (1, 4):
        for micro in x.chunk(num_micro):
            out, aux = model(micro)
            (loss_of(out, aux) / num_micro).backward()
        results.append(gradients(model))
    model.moe.buffer.close()
    return results[0], results[1]


def compiled(group: Any, over_mesh: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[int]]]:
    """Return outputs and gradients, eager and compiled as one graph, and the counts of the layer's metrics in each."""
    mesh = init_device_mesh("cpu", (group.size(),))
    model = block(mesh if over_mesh else group, num_experts=8)
    results, counts = [], []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        x = inputs_for(group.rank(), LENGTH).unsqueeze(0).requires_grad_()
        out, aux = run(x)
        loss_of(out, aux).backward()
        grads = {name: g.to_local() if hasattr(g, "to_local") else g for name, g in gradients(model).items()}
        results.append({"out": out.detach(), "x": x.grad, **grads})
        seen = model.moe.metrics.snapshot()
        counts.append([*seen.tokens_per_expert, seen.forwards])
    model.moe.buffer.close()
    return *results, counts


def two_in_flight(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Run two micro-batches one after the other, then concurrently in two threads and through two buffers."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    model = block(group)
    layer = model.moe
    second = Buffer(group, **layer.config.buffer_sizes())
    buffers = [layer.buffer, second]
    results: list[dict[str, Tensor]] = [{}, {}]

    def run(micro: int, concurrent: bool) -> None:
        torch.set_num_threads(1)  # another thread count would change the order of sums
        for step in range(3):
            if concurrent:  # each rank starts with another micro-batch, so that neither may wait for the other
                time.sleep(0.05 * ((rank + micro + step) % 2))
            x = inputs_for(10 * step + micro, 5 + rank).unsqueeze(0).requires_grad_()
            out, aux = model(x, buffers[micro if concurrent else 0])
            loss_of(out, aux).backward()
            results[concurrent] |= {f"out {micro} {step}": out.detach(), f"x {micro} {step}": x.grad}

    for micro in range(2):
        run(micro, False)
    results[0] |= gradients(model)
    threads = [threading.Thread(target=run, args=(micro, True)) for micro in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CASE_TIMEOUT_S)
        assert not thread.is_alive()
    results[1] |= gradients(model)
    forwards = layer.metrics.snapshot().forwards
    for buffer in buffers:
        buffer.close()
    return results[0], results[1], forwards
