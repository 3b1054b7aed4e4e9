"""Transformers' experts on rows that are packed by expert: nothing is sorted, and rows that hold no token stay out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from moe_rt.native.storage import blank
from moe_rt.nn.experts import grouped_linear, swiglu

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]

# Transformers' implementations that compute nothing but the formula below. The others (eager loops of a model's own,
# kernels of other libraries) are asked for by name, and so are called.
_SAME_FORMULA = ("grouped_mm", "batched_mm")
_PARAMETERS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
_FLAGS = ("config", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed")


class PackedExperts:
    """Runs an experts module of Transformers on received rows: up, gate, down, without the routing weights.

    Modules whose layout is the one that `use_experts_implementation` describes run as grouped matrix products on the
    rows as they are. Any other runs through its own forward, with rows that hold no token marked as nobody's.

    Args:
        module: the experts; its parameters hold this rank's experts while it is called.
        forward: the module's own forward.
        num_local: experts of this rank.
    """

    def __init__(self, module: nn.Module, forward: ExpertsForward, num_local: int) -> None:
        self._module: Any = module
        self._forward, self._num_local = forward, num_local
        # A gate with parameters of its own would lose their gradients in _Gate.
        self._known = (
            all(hasattr(module, flag) for flag in _FLAGS)
            and not self._module.has_post_expert_norm
            and {name for name, _ in module.named_parameters()} <= _PARAMETERS
        )

    @property
    def _implementation(self) -> str:
        config = getattr(self._module, "config", None)
        return getattr(config, "_experts_implementation", None) or "eager"

    @property
    def grouped(self) -> bool:
        """Whether rows run as grouped matrix products; the model's experts implementation may change between calls."""
        return self._known and self._implementation in _SAME_FORMULA

    def dtype_of_rows(self, x: Tensor) -> torch.dtype:
        """What rows travel in: grouped products want the weights' dtype, which under autocast is not that of x."""
        return self._module.down_proj.dtype if self.grouped else x.dtype

    def __call__(self, rows: Tensor, offs: Tensor) -> Tensor:
        """rows [capacity, H], those of expert e at offs[e - 1]:offs[e] -> [capacity, H]; the rest is unspecified."""
        return self._run_grouped(rows, offs) if self.grouped else self._run_own_forward(rows, offs)

    def _run_grouped(self, rows: Tensor, offs: Tensor) -> Tensor:
        m = self._module
        up = m.gate_up_proj if m.has_gate else m.up_proj
        up_bias, down_bias = None, None
        if m.has_bias:
            up_bias, down_bias = m.gate_up_proj_bias if m.has_gate else m.up_proj_bias, m.down_proj_bias
        rows = grouped_linear(rows, up, offs, up_bias, transposed=m.is_transposed)
        if not m.has_gate:
            rows = _Gate.apply(rows, offs, m.act_fn)
        elif type(m)._apply_gate is _default_apply_gate and isinstance(m.act_fn, (nn.SiLU, SiLUActivation)):
            rows = swiglu(rows, offs)
        else:
            rows = _Gate.apply(rows, offs, m._apply_gate)
        return grouped_linear(rows, m.down_proj, offs, down_bias, transposed=m.is_transposed)

    def _run_own_forward(self, rows: Tensor, offs: Tensor) -> Tensor:
        """At least one row, even if nobody's: FSDP and the backward of the exchange need the experts in the graph."""
        count = max(_count(rows, offs), 1)
        ids = _experts_of(count, offs)
        nobodys = (ids >= self._num_local)[:, None]
        if self._implementation == "eager":  # not every model's own loop knows ids past its experts
            ids = ids.clamp(max=self._num_local - 1)
        # Masked before and after: garbage times a weight of zero may be NaN, here and in the gradients.
        x = rows[:count].masked_fill(nobodys, 0)
        y = self._forward(x, ids[:, None], (~nobodys).to(x.dtype)).masked_fill(nobodys, 0)
        return pad(y.to(rows.dtype), (0, 0, 0, rows.shape[0] - count))


def _count(rows: Tensor, offs: Tensor) -> int:
    """Rows to work on: the real ones where offs is at hand; on a GPU all, since reading offs would wait for it."""
    return int(offs[-1]) if offs.device.type == "cpu" else rows.shape[0]


def _experts_of(count: int, offs: Tensor) -> Tensor:
    """The local expert of each row; the number of experts for rows past the last."""
    return torch.searchsorted(offs, torch.arange(count, dtype=offs.dtype, device=offs.device), right=True)


class _Gate(torch.autograd.Function):
    """A function of each row, on real rows only; computed again in backward, as swiglu is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offs: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(rows, offs)
        count = _count(rows, offs)
        y = function(rows[:count])
        return _in_place_of(rows, y, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, offs = ctx.saved_tensors
        count = _count(rows, offs)
        with torch.enable_grad():
            x = rows[:count].detach().requires_grad_()
            y = ctx.function(x)
        (grad,) = torch.autograd.grad(y, x, grads[0][:count])
        return _in_place_of(rows, grad, count), None, None


def _in_place_of(rows: Tensor, y: Tensor, count: int) -> Tensor:
    """y, with as many rows as `rows`; those past `count` are unspecified."""
    if count == rows.shape[0]:
        return y
    out = blank(y.new_empty(rows.shape[0], y.shape[1]))
    out[:count] = y
    return out
