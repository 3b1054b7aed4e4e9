"""The table of the torch ops: dispatch, combine and their backward ops, each declared once (declare.py).

Ops are functional and return fresh tensors of static shape, so that autograd, checkpointing and torch.compile see
nothing unusual; only combine_out writes to an argument. It has no gradients, nor has dispatch_scaled, whose rows are
codes. Rows past `offs[-1]` are neither written nor read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rt.config.codec import RowFormat
from moe_rt.engine.engine import Engine
from moe_rt.errors import Op
from moe_rt.ops.autograd import gradient_of_combine, gradient_of_dispatch
from moe_rt.ops.declare import halves, op


@op(Op.DISPATCH_BACKWARD, differentiable=("grad_recv_x", "grad_recv_weights"), names={"grad_recv_x": "grad"})
def dispatch_backward(
    grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: Engine, tag: int
) -> tuple[Tensor, Tensor]:
    """Return grad_x [T, H] and grad_topk_weights [T, K]."""
    return grad_recv_x.new_empty(send_plan.shape[0], grad_recv_x.shape[1]), grad_recv_weights.new_empty(send_plan.shape)


@op(Op.COMBINE_BACKWARD, differentiable=("grad_out", "y", "recv_weights"), names={"grad_out": "grad"})
def combine_backward(
    grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, engine: Engine, tag: int
) -> tuple[Tensor, Tensor]:
    """Return grad_y [N, H] and grad_recv_weights [capacity]."""
    return torch.empty_like(y), torch.empty_like(recv_weights)


@op(Op.COMBINE_BACKWARD, differentiable=("grad_out",), names={"grad_out": "grad"})
def combine_tokens_backward(
    grad_out: Tensor, recv_plan: Tensor, num_rows: int | torch.SymInt, engine: Engine, tag: int
) -> Tensor:
    """Return grad_y [num_rows, H]."""
    return grad_out.new_empty(num_rows, grad_out.shape[1])


_of_dispatch = gradient_of_dispatch(dispatch_backward)
_of_combine = gradient_of_combine(combine_backward, combine_tokens_backward)


@op(
    Op.DISPATCH,
    differentiable=("x", "topk_weights"),
    gradient=_of_dispatch,
    require_no_loss="refuse_recorded_window",
    require_traceable="require_window_as_handed_out",
)
def dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, engine: Engine, tag: int, max_tokens: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return recv_x, recv_weights, offs, recv_plan, send_plan."""
    capacity = _capacity(engine, max_tokens)
    return x.new_empty(capacity, engine.spec.hidden), *_received(x, topk_weights, engine, capacity)


@op(
    Op.DISPATCH,
    differentiable=("x", "scales", "topk_weights"),
    require_no_loss="require_no_grad_through_codes",
    names={"x": "x[0], codes", "scales": "x[1], scales"},
)
def dispatch_scaled(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    engine: Engine,
    tag: int,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of dispatch, with codes as recv_x, and recv_scales."""
    spec, capacity = engine.spec, _capacity(engine, max_tokens)
    row = RowFormat.of_codec(spec.dispatch_dtype, spec.hidden) if scales is None else RowFormat.of(x, scales)
    codes = x.new_empty(capacity, row.num_codes, dtype=row.codes)
    recv_scales = x.new_empty(capacity, row.num_scales, dtype=row.scales)
    return codes, *_received(x, topk_weights, engine, capacity), recv_scales


def _capacity(engine: Engine, max_tokens: int | None) -> int:
    return engine.capacity_for(None if max_tokens is None else int(max_tokens))  # a graph is specialised for this bound


def _received(x: Tensor, topk_weights: Tensor, engine: Engine, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return recv_weights, offs, recv_plan and send_plan of a dispatch, uninitialised."""
    return (
        topk_weights.new_empty(engine.weights_shape(capacity)),
        x.new_empty(engine.num_parts, dtype=torch.int32),
        x.new_empty(engine.plan_ints, dtype=torch.int32),
        x.new_empty(x.shape[0], engine.spec.num_topk, dtype=torch.int32),
    )


@op(Op.COMBINE, differentiable=("y", "recv_weights"), gradient=_of_combine)
def combine(
    y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: Engine, tag: int
) -> Tensor:
    """Return out [T, H]."""
    return y.new_empty(send_plan.shape[0], y.shape[1])


@op(Op.COMBINE, differentiable=("y", "recv_weights", "out"), method="combine", require_no_loss="require_no_grad")
def combine_out(
    y: Tensor,
    recv_weights: Tensor | None,
    recv_plan: Tensor,
    send_plan: Tensor,
    engine: Engine,
    tag: int,
    *,
    out: Tensor,
) -> None:
    """Write `out` [T, H]."""


_window = {"require_no_loss": "require_begin", "require_traceable": "require_window_as_handed_out"}
dispatch_begin, dispatch_finish = halves(
    "dispatch", gradient=_of_dispatch, differentiable=("x", "topk_weights"), **_window
)
dispatch_scaled_begin, dispatch_scaled_finish = halves(
    "dispatch_scaled", differentiable=("x", "scales", "topk_weights"), require_no_loss="require_no_grad_through_codes"
)
combine_begin, combine_finish = halves("combine", gradient=_of_combine, differentiable=("y", "recv_weights"))
dispatch_backward_begin, dispatch_backward_finish = halves(
    "dispatch_backward", differentiable=("grad_recv_x", "grad_recv_weights")
)
combine_backward_begin, combine_backward_finish = halves(
    "combine_backward", differentiable=("grad_out", "y", "recv_weights")
)
combine_tokens_backward_begin, combine_tokens_backward_finish = halves(
    "combine_tokens_backward", differentiable=("grad_out",)
)
