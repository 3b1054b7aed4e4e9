"""The gradients of dispatch and combine, for torch's dispatcher and for those who go past it alike.

dispatch           saves its plans;            backward: dispatch_backward (a combine-type op)
combine            saves y, weights, plans;    backward: combine_backward  (a dispatch-type op)
                   where rows are of tokens it saves the plan alone: combine_tokens_backward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_tracing, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from moe_rt.errors import Op
from moe_rt.native.engine import Engine


def unwatched(*tensors: Tensor) -> bool:
    """Whether torch's dispatcher would do nothing but call the engine: eager, plain tensors, no mode, no profiler."""
    if (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _is_tracing()
        or _profiler_enabled()
    ):
        return False
    for t in tensors:  # noqa: SIM110, as a generator would take longer than all that is asked above
        if type(t) is not Tensor:
            return False
    return True


def recorded(*tensors: Tensor | None) -> bool:
    """Whether a Function would leave a mark: a node of the graph, or torch's refusal of dual numbers."""
    if not torch.is_grad_enabled():
        return False
    for t in tensors:
        if t is not None and t.requires_grad:
            return True
    return forward_ad._current_level >= 0


def _backward(kind: Op, op: OpOverload, engine_op: Callable[..., Any], tensors: tuple[Tensor, ...], ctx: Any) -> Any:
    """Runs one; through the dispatcher if somebody watches, or wants the second derivative that it refuses."""
    if not torch.is_grad_enabled() and unwatched(*tensors):
        return engine_op(*tensors, ctx.tag)
    ctx.engine.require_call(kind, ctx.tag, grad=tensors[0])
    return op(*tensors, ctx.engine.id, ctx.tag)


def save_for_dispatch_backward(ctx: Any, engine: Engine, tag: int, output: tuple[Tensor, ...]) -> None:
    recv_x, recv_weights, _, recv_plan, send_plan = output
    ctx.engine, ctx.tag = engine, tag
    ctx.shapes, ctx.dtypes = (recv_x.shape, recv_weights.shape), (recv_x.dtype, recv_weights.dtype)
    ctx.set_materialize_grads(False)  # of five outputs only two have gradients
    ctx.save_for_backward(recv_plan, send_plan)


def differentiate_dispatch(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_recv_x, grad_recv_weights = grads[:2]
    recv_plan, send_plan = ctx.saved_tensors
    if grad_recv_x is None:
        grad_recv_x = recv_plan.new_zeros(ctx.shapes[0], dtype=ctx.dtypes[0])
    if grad_recv_weights is None:
        grad_recv_weights = recv_plan.new_zeros(ctx.shapes[1], dtype=ctx.dtypes[1])
    tensors = (grad_recv_x, grad_recv_weights, recv_plan, send_plan)
    op = torch.ops.moe_rt.dispatch_backward.default
    grad_x, grad_topk_weights = _backward(Op.DISPATCH_BACKWARD, op, ctx.engine.dispatch_backward, tensors, ctx)
    return grad_x, None, grad_topk_weights, None, None, None


def save_for_combine_backward(
    ctx: Any, engine: Engine, tag: int, y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor
) -> None:
    ctx.engine, ctx.tag = engine, tag
    if recv_weights is None:
        ctx.num_rows = y.shape[0]
        ctx.save_for_backward(recv_plan)
    else:
        ctx.save_for_backward(y, recv_weights, recv_plan)


def differentiate_combine(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    tensors = (grad_out, *ctx.saved_tensors)
    if len(tensors) == 2:
        return _differentiate_combine_of_tokens(ctx, *tensors), None, None, None, None, None
    op = torch.ops.moe_rt.combine_backward.default
    grad_y, grad_recv_weights = _backward(Op.COMBINE_BACKWARD, op, ctx.engine.combine_backward, tensors, ctx)
    return grad_y, grad_recv_weights, None, None, None, None


def _differentiate_combine_of_tokens(ctx: Any, grad_out: Tensor, recv_plan: Tensor) -> Tensor:
    if not torch.is_grad_enabled() and unwatched(grad_out, recv_plan):
        return ctx.engine.combine_tokens_backward(grad_out, recv_plan, ctx.num_rows, ctx.tag)
    ctx.engine.require_call(Op.COMBINE_BACKWARD, ctx.tag, grad=grad_out)
    op = torch.ops.moe_rt.combine_tokens_backward.default
    return op(grad_out, recv_plan, ctx.num_rows, ctx.engine.id, ctx.tag)


def differentiate_twice(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("second derivative of moe_rt's dispatch or combine: got one, expected first ones only")


# Saves in forward: torch would bind the arguments of a Function with a setup_context by name, which takes longer than
# the op.
class DispatchFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        engine: Engine,
        tag: int,
        max_tokens: int | None,
    ) -> tuple[Tensor, ...]:
        output = engine.dispatch(x, topk_idx, topk_weights, tag, max_tokens)
        save_for_dispatch_backward(ctx, engine, tag, output)
        return output

    backward = staticmethod(differentiate_dispatch)


class CombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: Engine, tag: int
    ) -> Tensor:
        output = engine.combine(y, recv_weights, recv_plan, send_plan, tag)
        save_for_combine_backward(ctx, engine, tag, y, recv_weights, recv_plan)
        return output

    backward = staticmethod(differentiate_combine)
