"""The experts: grouped linear layers and SwiGLU over packed rows, which touch only real rows.

Rows past `offs[-1]` of a receive buffer are unspecified: grouped_mm neither reads nor writes them, and the activation
here does not either, so no garbage can reach a gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.native import activation

_lib = torch.library.Library("moe_rt", "FRAGMENT")
_lib.define("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor")
_lib.define("swiglu(Tensor gate_up, Tensor offs) -> Tensor")
_lib.define("swiglu_backward(Tensor grad, Tensor gate_up, Tensor offs) -> Tensor")


def grouped_linear(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Each expert's rows times its own weight: y[rows of e] = x[rows of e] @ weight[e].T.

    Args:
        x: [rows, in], rows of expert e at offs[e - 1]:offs[e].
        weight: [L, out, in].
        offs: int32 [L], inclusive.

    Returns:
        [rows, out]; rows past offs[-1] are unspecified.
    """
    return torch.ops.moe_rt.grouped_mm(x, weight.transpose(1, 2), offs)


def swiglu(gate_up: Tensor, offs: Tensor) -> Tensor:
    """silu(gate) * up; gate_up [rows, 2F] holds gate in its first F columns. Rows past offs[-1] are not touched."""
    return torch.ops.moe_rt.swiglu(gate_up, offs)


class SwiGLUExperts(nn.Module):
    """The L experts of this rank: down(silu(gate(x)) * up(x)), biases none.

    Parameters are slices, in local order, of the global [E, 2F, H] and [E, H, F] tensors.
    """

    def __init__(self, num_local: int, hidden: int, intermediate: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_local, 2 * intermediate, hidden, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_local, hidden, intermediate, device=device, dtype=dtype))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """x [rows, H] packed by expert -> [rows, H], in x's dtype."""
        h = grouped_linear(x, self.gate_up_proj.to(x.dtype), offs)
        return grouped_linear(swiglu(h, offs), self.down_proj.to(x.dtype), offs)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """[rows, K] x [L, K, N] -> [rows, N], or [M, rows] x [rows, N] -> [L, M, N], as torch's grouped_mm."""
    if _kernel_takes(a) and _kernel_takes(b):
        return F.grouped_mm(a, b, offs=offs)
    ends = offs.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    out = a.new_empty(a.shape[0], b.shape[2])
    for e, (i, j) in enumerate(spans):
        torch.mm(a[i:j], b[e], out=out[i:j])
    return out


def _kernel_takes(t: Tensor) -> bool:
    """torch's CPU kernel wants no fp64, and strides and address in multiples of 16 bytes."""
    aligned = all(s == 1 or s * t.itemsize % 16 == 0 for s in t.stride()) and t.data_ptr() % 16 == 0
    return t.dtype is not torch.float64 and aligned


def _grouped_mm_on_gpu(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """As _grouped_mm, but nobody waits for offs to come to the host."""
    if _gpu_kernel_takes(a) and _gpu_kernel_takes(b) and b.shape[-1] * b.itemsize % 16 == 0:
        return F.grouped_mm(a, b, offs=offs)
    return _tiled_mm(a, b, offs)


def _gpu_kernel_takes(t: Tensor) -> bool:
    """torch reads offs on the host for other dtypes and GPUs, and pads or refuses rows that are not 16-byte vectors."""
    if t.dtype is not torch.bfloat16 or _compute_capability(t.device)[0] not in (9, 10) or t.numel() == 0:
        return False
    aligned = all(s == 1 or (s > 0 and s * t.itemsize % 16 == 0) for s in t.stride()) and t.data_ptr() % 16 == 0
    return aligned and t.stride()[-2:].count(1) == 1


@functools.cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _tiled_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """grouped_mm as one bmm of a size that is known without offs.

    Every expert's rows are cut into tiles of rows / L. However they are spread, that makes at most 2 L tiles: twice the
    work that all rows would be, and each tile reads a copy of its expert's weight.
    """
    num_local, rows = offs.shape[0], b.shape[0] if b.dim() == 2 else a.shape[0]
    if rows == 0:
        return a.new_zeros(num_local, a.shape[0], b.shape[1]) if b.dim() == 2 else a.new_zeros(0, b.shape[2])
    height = -(-rows // num_local)
    bounds = F.pad(offs.long(), (1, 0))
    tile_bounds = F.pad(((bounds.diff() + (height - 1)) // height).cumsum(0), (1, 0))
    tile = torch.arange(2 * num_local, device=a.device)
    expert = torch.searchsorted(tile_bounds[1:], tile, right=True).clamp_(max=num_local - 1)
    first_row = bounds[expert] + (tile - tile_bounds[expert]) * height
    row = first_row[:, None] + torch.arange(height, device=a.device)
    unreal = row >= bounds[expert + 1][:, None]
    source = row.clamp(max=rows - 1)
    if b.dim() == 3:
        out = a.new_empty(rows + 1, b.shape[2])  # the last row takes what belongs to none
        out[row.masked_fill(unreal, rows)] = torch.bmm(a[source], b[expert])
        return out[:rows]
    # What lies past an expert's rows must not meet them, not even multiplied by zero: it may be NaN.
    left, right = (t[source].masked_fill_(unreal[..., None], 0) for t in (a.t(), b))
    product = torch.bmm(left.transpose(1, 2), right)
    # From three tiles of an expert on, the order of their sum is that of torch's index_add_.
    return a.new_zeros(num_local, *product.shape[1:]).index_add_(0, expert, product)


def _swiglu(gate_up: Tensor, offs: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    n = int(offs[-1])
    gate, up = gate_up[:n].chunk(2, dim=1)
    torch.mul(F.silu(gate), up, out=out[:n])
    return out


def _swiglu_backward(grad: Tensor, gate_up: Tensor, offs: Tensor) -> Tensor:
    out = torch.empty_like(gate_up)
    n = int(offs[-1])
    gate, up = gate_up[:n].chunk(2, dim=1)
    grad_gate, grad_up = out[:n].chunk(2, dim=1)
    grad = grad[:n]
    torch.mul(grad, F.silu(gate), out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return out


for _name, _on_cpu, _on_gpu in (
    ("grouped_mm", _grouped_mm, _grouped_mm_on_gpu),
    ("swiglu", _swiglu, activation.swiglu),
    ("swiglu_backward", _swiglu_backward, activation.swiglu_backward),
):
    _lib.impl(_name, _on_cpu, "CPU")
    _lib.impl(_name, _on_gpu, "CUDA")


@torch.library.register_fake("moe_rt::grouped_mm", lib=_lib)
def _(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if b.dim() == 2:
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[2])


@torch.library.register_fake("moe_rt::swiglu", lib=_lib)
def _(gate_up: Tensor, offs: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.register_fake("moe_rt::swiglu_backward", lib=_lib)
def _(grad: Tensor, gate_up: Tensor, offs: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def _save_grouped_mm(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_grouped_mm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs = ctx.saved_tensors
    grad = grad.contiguous()  # the gradient of a bare sum() is an expanded scalar, whose strides no kernel takes
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.moe_rt.grouped_mm(grad, b.transpose(1, 2), offs)
    if ctx.needs_input_grad[1]:
        # As the transpose of grad.T @ a, so that the gradient of a transposed [L, N, K] weight comes out contiguous.
        grad_b = torch.ops.moe_rt.grouped_mm(grad.t(), a, offs).transpose(1, 2)
    return grad_a, grad_b, None


def _save_swiglu(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, offs = ctx.saved_tensors
    return torch.ops.moe_rt.swiglu_backward(grad, gate_up, offs), None


torch.library.register_autograd(
    "moe_rt::grouped_mm", _differentiate_grouped_mm, setup_context=_save_grouped_mm, lib=_lib
)
torch.library.register_autograd("moe_rt::swiglu", _differentiate_swiglu, setup_context=_save_swiglu, lib=_lib)
