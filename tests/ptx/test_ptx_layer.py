"""A layer over two virtual ranks on executed kernels has the output and gradient bits of CPU ranks."""

from __future__ import annotations

from typing import Any

import torch
from ptx.gpu import PtxGpu
from ptx.own_process import isolated
from support.ranks import ThreadRanks
from torch import Tensor

from moe_rt import MoEConfig, MoELayer

SIZE = 2


def forward_backward(group: Any) -> dict[str, Tensor]:
    """Run two steps; return the last one's output and gradients."""
    config = MoEConfig(hidden=20, intermediate=16, num_experts=8, num_topk=3, num_max_tokens_per_rank=12)
    layer = MoELayer(config, group)
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) / 4)
    for tokens in (12, 7):
        layer.zero_grad()
        x = torch.randn(tokens, 20, generator=drawn).requires_grad_()
        out, _ = layer(x)
        out.sum().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad}
    return found | {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def on_both() -> int:
    expected = ThreadRanks(SIZE).run(forward_backward)
    gpu = PtxGpu()
    for got, wanted in zip(ThreadRanks(SIZE, gpu).run(forward_backward), expected, strict=True):
        assert got.keys() == wanted.keys()
        assert torch.equal(got.pop("out"), wanted.pop("out"))
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, wanted[name], msg=lambda text, name=name: f"{name}: {text}")
    return len(gpu.launched)


def test_layer() -> None:
    assert isolated(on_both) >= SIZE * 2 * 8, "two steps of four ops of two launches each"
