"""The activation's compiled kernels agree with the CPU to one unit in the last place, as a CPU has an exact ex2."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ptx.gpu import PtxGpu
from ptx.own_process import isolated

from moe_rt.ops import cuda_activation

DTYPES = [torch.float32, torch.bfloat16]
SWEPT = [torch.float16, torch.float64]
WIDTHS = (1, 7, 8, 24)  # with and without whole vectors
SPREADS = ([4, 0, 5], [0, 0, 0], [0, 13, 0])
ROWS = 13


def forward_and_backward(dtype: torch.dtype) -> None:
    gpu = PtxGpu(num_sms=2)
    cuda_activation.Gpu = lambda device: gpu  # type: ignore[assignment,misc]
    torch.manual_seed(1)
    eps = torch.finfo(dtype).eps
    bounds = dict(rtol=(0.51 if dtype.itemsize == 2 else 16) * eps, atol=1e-6)
    for width in WIDTHS:
        for sizes in SPREADS:
            offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
            real = int(offs[-1])
            gate_up, grad = (3 * torch.randn(ROWS, n * width).to(dtype) for n in (2, 1))
            gate_up[real:] = grad[real:] = float("nan")
            leaf = gate_up[:real].double().requires_grad_()
            gate, up = leaf.chunk(2, dim=1)
            exact = F.silu(gate) * up
            (exact_grad,) = torch.autograd.grad(exact, leaf, grad[:real].double())
            out = cuda_activation.swiglu(gate_up, offs)
            torch.testing.assert_close(out[:real].double(), exact.detach(), **bounds)
            got = cuda_activation.swiglu_backward(grad, gate_up, offs)
            torch.testing.assert_close(got[:real].double(), exact_grad, **bounds)
    assert len(gpu.launched) == 2 * len(WIDTHS) * len(SPREADS)


@pytest.mark.parametrize("dtype", [*DTYPES, *(pytest.param(d, marks=pytest.mark.sweep) for d in SWEPT)], ids=str)
def test_within_the_last_place(dtype: torch.dtype) -> None:
    isolated(forward_and_backward, dtype)
