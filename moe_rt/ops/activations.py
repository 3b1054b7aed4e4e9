"""Activations of the experts over packed rows. CPU code neither reads nor writes rows past offs[-1].

SwiGLU of packed gate and up columns has its own CUDA kernels, which do not touch them either. The other kinds are plain
torch on CUDA, over all rows: each row is independent, so garbage past the end stays past the end. They compute in fp32
(fp64 for fp64), round once, and save only their input for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rt.engine.differentiation import SECOND_DERIVATIVE, Args, differentiate, refuse_call
from moe_rt.engine.storage import blank
from moe_rt.ops import cuda_activation

Activation = Literal["swiglu", "geglu", "geglu_tanh", "relu2", "clamped_swiglu"]

_lib = torch.library.Library("moe_rt", "FRAGMENT")
_lib.define("swiglu(Tensor gate_up, Tensor offs) -> Tensor")
_lib.define("swiglu_backward(Tensor grad, Tensor gate_up, Tensor offs) -> Tensor")
_SHAPE_OF_KIND = "Tensor offs, str kind, bool interleaved, float alpha, float limit"
_lib.define(f"activate(Tensor[] h, {_SHAPE_OF_KIND}) -> Tensor")
_lib.define(f"activate_backward(Tensor grad, Tensor[] h, {_SHAPE_OF_KIND}) -> Tensor[]")


def swiglu(gate_up: Tensor, offs: Tensor) -> Tensor:
    """silu(gate) * up; gate_up [rows, 2F] holds gate in its first F columns. Rows past offs[-1] are not touched."""
    return torch.ops.moe_rt.swiglu(gate_up, offs)


def activate(
    h: Sequence[Tensor],
    offs: Tensor,
    kind: Activation,
    *,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Activate the gate and up projections. The result is the input of the down projection.

    Args:
        h: gate and up [rows, F] each; or one [rows, 2F] with both, gate first; for "relu2" one [rows, F].
        offs: int32 [L], inclusive.
        kind: "swiglu", "geglu" (erf) and "geglu_tanh" (Shazeer 2020, GLU Variants Improve Transformer); "relu2",
            relu(h)^2 without a gate (So et al. 2021, Primer); "clamped_swiglu", (up + 1) * gate * sigmoid(alpha * gate)
            with gate at most and |up| at most limit (OpenAI 2025, gpt-oss).
        interleaved: gate is in the even columns of the one tensor, up in the odd ones.

    Returns:
        [rows, F]; rows past offs[-1] are unspecified.
    """
    if kind == "swiglu" and len(h) == 1 and not interleaved:
        return swiglu(h[0], offs)
    return torch.ops.moe_rt.activate(h, offs, kind, interleaved, alpha, limit)


def apply(kind: Activation, gate: Tensor, up: Tensor | None, *, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Apply the formula to rows that are all real, differentiated by autograd. Kinds without a gate take up=None."""
    return FORMULAS[kind].forward(gate, up, alpha, limit)


class Formula(NamedTuple):
    """forward(gate, up, alpha, limit); backward(grad, gate, up, alpha, limit) -> gradients of gate and, if any, up."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]


def _gated(act: Callable[[Tensor], Tensor], act_backward: Callable[[Tensor, Tensor], Tensor]) -> Formula:
    return Formula(
        lambda gate, up, alpha, limit: act(gate) * up,
        lambda grad, gate, up, alpha, limit: (act_backward(grad * up, gate), grad * act(gate)),
    )


def _gelu(approximate: str) -> Formula:
    return _gated(
        lambda gate: F.gelu(gate, approximate=approximate),
        lambda grad, gate: torch.ops.aten.gelu_backward(grad, gate, approximate=approximate),
    )


def _clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def _clamped_swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(alpha * g)
    grad_gate = grad * (u + 1) * s * (1 + alpha * g * (1 - s))
    return grad_gate.masked_fill(gate > limit, 0), (grad * g * s).masked_fill(up.abs() > limit, 0)


FORMULAS: dict[Activation, Formula] = {
    "swiglu": _gated(F.silu, torch.ops.aten.silu_backward),
    "geglu": _gelu("none"),
    "geglu_tanh": _gelu("tanh"),
    "relu2": Formula(
        lambda h, _, alpha, limit: h.relu().square(),
        lambda grad, h, _, alpha, limit: (2 * grad * h.relu(),),
    ),
    "clamped_swiglu": Formula(_clamped_swiglu, _clamped_swiglu_backward),
}


def _parts(h: Sequence[Tensor], kind: Activation, interleaved: bool, rows: int) -> list[Tensor]:
    """Views of the first `rows` rows of gate and up, or of the one tensor of a kind without gate."""
    h = [t[:rows] for t in h]
    if len(h) == 2 or kind == "relu2":
        return h
    return [h[0][:, 0::2], h[0][:, 1::2]] if interleaved else list(h[0].chunk(2, dim=1))


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype is torch.float64 else t.float()


def _output(h: Sequence[Tensor], kind: Activation) -> Tensor:
    packed = len(h) == 1 and kind != "relu2"
    return blank(h[0].new_empty(h[0].shape[0], h[0].shape[1] // (2 if packed else 1)))


def _run(rows: int, h: Sequence[Tensor], kind: Activation, interleaved: bool, alpha: float, limit: float) -> Tensor:
    out = _output(h, kind)
    parts = [_wide(t) for t in _parts(h, kind, interleaved, rows)]
    out[:rows] = FORMULAS[kind].forward(parts[0], parts[1] if len(parts) == 2 else None, alpha, limit)
    return out


def _run_backward(
    rows: int, grad: Tensor, h: Sequence[Tensor], kind: Activation, interleaved: bool, alpha: float, limit: float
) -> list[Tensor]:
    grads = [blank(torch.empty_like(t)) for t in h]
    parts = [_wide(t) for t in _parts(h, kind, interleaved, rows)]
    up = parts[1] if len(parts) == 2 else None
    results = FORMULAS[kind].backward(_wide(grad[:rows]), parts[0], up, alpha, limit)
    for place, result in zip(_parts(grads, kind, interleaved, rows), results, strict=False):
        place[:] = result
    return grads


def _activate(h: list[Tensor], offs: Tensor, *kind: Any) -> Tensor:
    return _run(int(offs[-1]), h, *kind)


def _activate_on_gpu(h: list[Tensor], offs: Tensor, *kind: Any) -> Tensor:
    return _run(h[0].shape[0], h, *kind)


def _activate_backward(grad: Tensor, h: list[Tensor], offs: Tensor, *kind: Any) -> list[Tensor]:
    return _run_backward(int(offs[-1]), grad, h, *kind)


def _activate_backward_on_gpu(grad: Tensor, h: list[Tensor], offs: Tensor, *kind: Any) -> list[Tensor]:
    return _run_backward(h[0].shape[0], grad, h, *kind)


def _swiglu(gate_up: Tensor, offs: Tensor) -> Tensor:
    out = blank(gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2))
    n = int(offs[-1])
    gate, up = gate_up[:n].chunk(2, dim=1)
    torch.mul(F.silu(gate), up, out=out[:n])
    return out


def _swiglu_backward(grad: Tensor, gate_up: Tensor, offs: Tensor) -> Tensor:
    out = blank(torch.empty_like(gate_up))
    n = int(offs[-1])
    gate, up = gate_up[:n].chunk(2, dim=1)
    grad_gate, grad_up = out[:n].chunk(2, dim=1)
    grad = grad[:n]
    torch.mul(grad, F.silu(gate), out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return out


for _name, _on_cpu, _on_gpu in (
    ("swiglu", _swiglu, cuda_activation.swiglu),
    ("swiglu_backward", _swiglu_backward, cuda_activation.swiglu_backward),
    ("activate", _activate, _activate_on_gpu),
    ("activate_backward", _activate_backward, _activate_backward_on_gpu),
):
    _lib.impl(_name, _on_cpu, "CPU")
    _lib.impl(_name, _on_gpu, "CUDA")


@torch.library.register_fake("moe_rt::swiglu", lib=_lib)
def _(gate_up: Tensor, offs: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.register_fake("moe_rt::swiglu_backward", lib=_lib)
def _(grad: Tensor, gate_up: Tensor, offs: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


@torch.library.register_fake("moe_rt::activate", lib=_lib)
def _(h: list[Tensor], offs: Tensor, kind: Activation, interleaved: bool, alpha: float, limit: float) -> Tensor:
    return _output(h, kind)


@torch.library.register_fake("moe_rt::activate_backward", lib=_lib)
def _(
    grad: Tensor, h: list[Tensor], offs: Tensor, kind: Activation, interleaved: bool, alpha: float, limit: float
) -> list[Tensor]:
    return [torch.empty_like(t) for t in h]


def _save_swiglu(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, offs = ctx.saved_tensors
    return torch.ops.moe_rt.swiglu_backward(grad, gate_up, offs), None


def _save_activate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, offs, *ctx.kind = inputs
    ctx.save_for_backward(*h, offs)


def _differentiate_activate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *h, offs = ctx.saved_tensors
    return torch.ops.moe_rt.activate_backward(grad, h, offs, *ctx.kind), None, None, None, None, None


def _tangent_of_swiglu(args: Args, tangents: Args) -> Tensor:
    gate_up, offs = args
    return _tangent_of_activate(([gate_up], offs, "swiglu", False, 0.0, 0.0), ([tangents[0]],))


def _tangent_of_activate(args: Args, tangents: Args) -> Tensor:
    """Return the tangent: a sum over gate and up, because a row's output depends only on its own elements."""
    h, offs, *kind = args
    ones = torch.ones_like(_output(h, kind[0]))
    slopes = torch.ops.moe_rt.activate_backward(ones, h, offs, *kind)
    moved = [torch.zeros_like(slope) if t is None else slope * t for slope, t in zip(slopes, tangents[0], strict=True)]
    gate, *up = _parts(moved, kind[0], kind[1], len(ones))
    return gate + up[0] if up else gate


def _differentiate_twice(ctx: Any, *grads: Any) -> NoReturn:
    refuse_call(f"activation: {SECOND_DERIVATIVE}")


def _no_tangent(args: Args, tangents: Args) -> NoReturn:
    _differentiate_twice(None)


differentiate(_lib, "swiglu", _differentiate_swiglu, _save_swiglu, tangents=_tangent_of_swiglu)
differentiate(_lib, "activate", _differentiate_activate, _save_activate, tangents=_tangent_of_activate)
for _name in ("swiglu_backward", "activate_backward"):
    differentiate(_lib, _name, _differentiate_twice, None, tangents=_no_tangent)
