"""Experts without rows get zero gradients, even if torch's grouped product on a GPU leaves garbage there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt.ops import grouped
from moe_rt.ops.grouped import grouped_linear

SPREADS = ([4, 0, 5, 0], [0, 0, 0, 0], [0, 9, 0, 0], [3, 2, 2, 2])
ROWS, WIDTH, OUT = 12, 16, 8


def leaves_garbage(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """Stand-in for torch's product on compute capability 10, which does not write elements without rows."""
    if b.dim() == 3:
        out = a.new_full((a.shape[0], b.shape[2]), float("nan"))
    else:
        out = a.new_full((offs.shape[0], a.shape[0], b.shape[1]), float("nan"))
    begin = 0
    for e, end in enumerate(offs.tolist()):
        if begin < end and b.dim() == 3:
            out[begin:end] = a[begin:end] @ b[e]
        elif begin < end:
            out[e] = a[:, begin:end] @ b[begin:end]
        begin = end
    return out


class OnGpu(TorchDispatchMode):
    """Runs the CUDA implementations of the grouped ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("moe_rt::")
        on_gpu = {
            "grouped_mm": grouped._grouped_mm_on_gpu,
            "grouped_add": grouped._grouped_add_on_gpu,
            "grouped_sum": grouped._grouped_sum_on_gpu,
        }.get(name)
        return on_gpu(*args) if on_gpu else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("major", [9, 10])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SPREADS, ids=str)
def test_gradients(monkeypatch: pytest.MonkeyPatch, sizes: list[int], transposed: bool, major: int) -> None:
    generator, real = torch.Generator().manual_seed(0), sum(sizes)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, grad = drawn(ROWS, WIDTH), drawn(ROWS, OUT)
    x[real:], grad[real:] = float("nan"), float("nan")
    shape = (len(sizes), WIDTH, OUT) if transposed else (len(sizes), OUT, WIDTH)
    x, weight, bias = x.requires_grad_(), drawn(*shape).requires_grad_(), drawn(len(sizes), OUT).requires_grad_()
    offs = torch.tensor(sizes).cumsum(0).int()
    want_out = grouped_linear(x, weight, offs, bias, transposed=transposed)
    want = torch.autograd.grad(want_out, (x, weight, bias), grad)
    calls: list[int] = []

    def stand_in(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        calls.append(b.dim())
        return leaves_garbage(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", stand_in)
    monkeypatch.setattr(grouped, "_compute_capability", lambda device: (major, 0))
    with OnGpu():
        out = grouped_linear(x, weight, offs, bias, transposed=transposed)
        grad_x, grad_weight, grad_bias = torch.autograd.grad(out, (x, weight, bias), grad)
    assert sorted(calls) == [2, 2, 3, 3], "both ways and both gradients took torch's kernel"
    close = dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[:real], want_out[:real], **close)
    torch.testing.assert_close(grad_x[:real], want[0][:real], **close)
    torch.testing.assert_close(grad_weight, want[1], **close)
    torch.testing.assert_close(grad_bias, want[2], **close)
    for e, size in enumerate(sizes):
        assert size or not (grad_weight[e].count_nonzero() or grad_bias[e].count_nonzero())
