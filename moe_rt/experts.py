"""The experts: grouped linear layers and SwiGLU over packed rows, which touch only real rows.

Rows past `offs[-1]` of a receive buffer are unspecified: grouped_mm neither reads nor writes them, and the activation
here does not either, so no garbage can reach a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def _num_rows(offs: Tensor, like: Tensor) -> int:
    # On the CPU the count is already here; on a device nobody may wait for it, so all rows are computed.
    return int(offs[-1]) if offs.device.type == "cpu" else like.shape[0]


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """[rows, K] x [L, K, N] -> [rows, N], or [M, rows] x [rows, N] -> [L, M, N], as torch's grouped_mm."""
    if a.device.type != "cpu" or (_kernel_takes(a) and _kernel_takes(b)):
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


def _swiglu(gate_up: Tensor, offs: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    n = _num_rows(offs, gate_up)
    gate, up = gate_up[:n].chunk(2, dim=1)
    torch.mul(F.silu(gate), up, out=out[:n])
    return out


def _swiglu_backward(grad: Tensor, gate_up: Tensor, offs: Tensor) -> Tensor:
    out = torch.empty_like(gate_up)
    n = _num_rows(offs, gate_up)
    gate, up = gate_up[:n].chunk(2, dim=1)
    grad_gate, grad_up = out[:n].chunk(2, dim=1)
    grad = grad[:n]
    torch.mul(grad, F.silu(gate), out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return out


for _name, _impl in {"grouped_mm": _grouped_mm, "swiglu": _swiglu, "swiglu_backward": _swiglu_backward}.items():
    for _key in ("CPU", "CUDA"):
        _lib.impl(_name, _impl, _key)


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
