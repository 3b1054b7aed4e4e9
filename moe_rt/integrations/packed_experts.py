"""Runs experts of Transformers on rows that are packed by expert, without sorting and without unused rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from moe_rt.engine.storage import blank
from moe_rt.nn.experts import grouped_linear, swiglu

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]

# Implementations of Transformers that compute exactly the formula below. Others (a model's own eager loop, kernels of
# other libraries) are called as the user chose.
_SAME_FORMULA = ("grouped_mm", "batched_mm")
_PARAMETERS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
_FLAGS = ("config", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed")


class PackedExperts:
    """Runs an experts module of Transformers on received rows: up, gate, down, without the routing weights.

    Modules with the layout that `use_experts_implementation` describes run as grouped matrix products directly on the
    rows. Any other module runs through its own forward, with unused rows masked.

    Args:
        module: the experts; during a call its parameters are those of this rank's experts.
        forward: the module's own forward.
        num_local: experts of this rank (L).

    Attributes:
        row_wise: see `moe_rt.ops.grouped.grouped_linear`.
    """

    row_wise = False

    def __init__(self, module: nn.Module, forward: ExpertsForward, num_local: int) -> None:
        self._module: Any = module
        self._forward, self._num_local = forward, num_local
        # A gate with parameters would lose their gradients in _Gate.
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
        """True if rows run as grouped matrix products; the model's experts implementation may change between calls."""
        return self._known and self._implementation in _SAME_FORMULA

    def dtype_of_rows(self, x: Tensor) -> torch.dtype:
        """Return the dtype of rows: grouped products need the weights' dtype, which under autocast may not be x's."""
        return self._module.down_proj.dtype if self.grouped else x.dtype

    def __call__(self, rows: Tensor, offs: Tensor) -> Tensor:
        """Run rows [capacity, H], expert e's at offs[e - 1]:offs[e] -> [capacity, H]; the rest is unspecified."""
        return self._run_grouped(rows, offs) if self.grouped else self._run_own_forward(rows, offs)

    def _run_grouped(self, rows: Tensor, offs: Tensor) -> Tensor:
        m = self._module
        up = m.gate_up_proj if m.has_gate else m.up_proj
        up_bias, down_bias = None, None
        if m.has_bias:
            up_bias, down_bias = m.gate_up_proj_bias if m.has_gate else m.up_proj_bias, m.down_proj_bias
        rows = grouped_linear(rows, up, offs, up_bias, transposed=m.is_transposed, row_wise=self.row_wise)
        if not m.has_gate:
            rows = _Gate.apply(rows, offs, m.act_fn)
        elif type(m)._apply_gate is _default_apply_gate and isinstance(m.act_fn, (nn.SiLU, SiLUActivation)):
            rows = swiglu(rows, offs)
        else:
            rows = _Gate.apply(rows, offs, m._apply_gate)
        return grouped_linear(rows, m.down_proj, offs, down_bias, transposed=m.is_transposed, row_wise=self.row_wise)

    def _run_own_forward(self, rows: Tensor, offs: Tensor) -> Tensor:
        """Run at least one row, even an unused one: FSDP and the exchange's backward need the experts in the graph."""
        count = max(_count(rows, offs), 1)
        ids = _experts_of(count, offs)
        nobodys = (ids >= self._num_local)[:, None]
        if self._implementation == "eager":  # some models' loops fail on ids past their experts
            ids = ids.clamp(max=self._num_local - 1)
        # Mask before and after: garbage times a weight of zero may be NaN, here and in the gradients.
        x = rows[:count].masked_fill(nobodys, 0)
        y = self._forward(x, ids[:, None], (~nobodys).to(x.dtype)).masked_fill(nobodys, 0)
        return pad(y.to(rows.dtype), (0, 0, 0, rows.shape[0] - count))


def _count(rows: Tensor, offs: Tensor) -> int:
    """Return the number of rows to process: real rows on a CPU, all rows on a GPU, where reading offs would wait."""
    return int(offs[-1]) if offs.device.type == "cpu" else rows.shape[0]


def _experts_of(count: int, offs: Tensor) -> Tensor:
    """Return the local expert of each row; the number of experts for unused rows."""
    return torch.searchsorted(offs, torch.arange(count, dtype=offs.dtype, device=offs.device), right=True)


class _Gate(torch.autograd.Function):
    """Applies a row-wise function to real rows only; recomputes it in backward, like swiglu."""

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
    """Extend y to as many rows as `rows`; rows past `count` are unspecified."""
    if count == rows.shape[0]:
        return y
    out = blank(y.new_empty(rows.shape[0], y.shape[1]))
    out[:count] = y
    return out
