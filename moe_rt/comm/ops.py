"""The torch ops: dispatch, combine and their backwards, with fakes and autograd.

    dispatch           saves its plans;            backward: dispatch_backward (a combine-type op)
    combine            saves y, weights, plans;    backward: combine_backward  (a dispatch-type op)

Ops are functional and return fresh tensors of static shape, so that autograd, checkpointing and torch.compile see
nothing unusual. Rows past `offs[-1]` are never written nor read.

torch's dispatcher, and the Python that it runs around an op for autograd, take several times as long as exchanging one
token. They serve those who trace, transform or watch ops, and name a buffer by an integer, its engine's id, which a
graph can hold; where nobody does, `dispatch` and `combine` go straight to the engine, with the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_tracing, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._ops import OpOverload
from torch.compiler import is_dynamo_compiling

from moe_rt.errors import Op
from moe_rt.native.engine import Engine, engine_by_id

_lib = torch.library.Library("moe_rt", "FRAGMENT")

_lib.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor topk_weights, int engine, int tag) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_lib.define("combine(Tensor y, Tensor recv_weights, Tensor recv_plan, Tensor send_plan, int engine, int tag) -> Tensor")
_lib.define(
    "dispatch_backward(Tensor grad_recv_x, Tensor grad_recv_weights, Tensor recv_plan, Tensor send_plan, int engine, "
    "int tag) -> (Tensor, Tensor)"
)
_lib.define(
    "combine_backward(Tensor grad_out, Tensor y, Tensor recv_weights, Tensor recv_plan, int engine, int tag) -> "
    "(Tensor, Tensor)"
)


def _dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return engine_by_id(engine).dispatch(x, topk_idx, topk_weights, tag)


def _combine(y: Tensor, recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int) -> Tensor:
    return engine_by_id(engine).combine(y, recv_weights, recv_plan, send_plan, tag)


def _dispatch_backward(
    grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor]:
    return engine_by_id(engine).dispatch_backward(grad_recv_x, grad_recv_weights, recv_plan, send_plan, tag)


def _combine_backward(
    grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor]:
    return engine_by_id(engine).combine_backward(grad_out, y, recv_weights, recv_plan, tag)


for _name, _impl in {
    "dispatch": _dispatch,
    "combine": _combine,
    "dispatch_backward": _dispatch_backward,
    "combine_backward": _combine_backward,
}.items():
    for _key in ("CPU", "CUDA"):  # the engine knows which machine it is
        _lib.impl(_name, _impl, _key)


@torch.library.register_fake("moe_rt::dispatch", lib=_lib)
def _(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    e = engine_by_id(engine)
    return (
        x.new_empty(e.capacity, e.spec.hidden),
        topk_weights.new_empty(e.capacity),
        x.new_empty(e.num_local_experts, dtype=torch.int32),
        x.new_empty(e.plan_ints, dtype=torch.int32),
        x.new_empty(x.shape[0], e.spec.num_topk, dtype=torch.int32),
    )


@torch.library.register_fake("moe_rt::combine", lib=_lib)
def _(y: Tensor, recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int) -> Tensor:
    return y.new_empty(send_plan.shape[0], y.shape[1])


@torch.library.register_fake("moe_rt::dispatch_backward", lib=_lib)
def _(
    grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor]:
    return grad_recv_x.new_empty(send_plan.shape[0], grad_recv_x.shape[1]), grad_recv_weights.new_empty(send_plan.shape)


@torch.library.register_fake("moe_rt::combine_backward", lib=_lib)
def _(
    grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(recv_weights)


def _unwatched(*tensors: Tensor) -> bool:
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


def _backward(kind: Op, op: OpOverload, engine_op: Callable[..., Any], tensors: tuple[Tensor, ...], ctx: Any) -> Any:
    """Runs one; through the dispatcher if somebody watches, or wants the second derivative that it refuses."""
    if not torch.is_grad_enabled() and _unwatched(*tensors):
        return engine_op(*tensors, ctx.tag)
    ctx.engine.require_call(kind, ctx.tag, grad=tensors[0])
    return op(*tensors, ctx.engine.id, ctx.tag)


def _save_for_dispatch_backward(ctx: Any, engine: Engine, tag: int, output: tuple[Tensor, ...]) -> None:
    recv_x, recv_weights, _, recv_plan, send_plan = output
    ctx.engine, ctx.tag = engine, tag
    ctx.rows_shape, ctx.dtypes = recv_x.shape, (recv_x.dtype, recv_weights.dtype)
    ctx.set_materialize_grads(False)  # of five outputs only two have gradients
    ctx.save_for_backward(recv_plan, send_plan)


def _differentiate_dispatch(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_recv_x, grad_recv_weights = grads[:2]
    recv_plan, send_plan = ctx.saved_tensors
    if grad_recv_x is None:
        grad_recv_x = recv_plan.new_zeros(ctx.rows_shape, dtype=ctx.dtypes[0])
    if grad_recv_weights is None:
        grad_recv_weights = recv_plan.new_zeros(ctx.rows_shape[:1], dtype=ctx.dtypes[1])
    tensors = (grad_recv_x, grad_recv_weights, recv_plan, send_plan)
    op = torch.ops.moe_rt.dispatch_backward.default
    grad_x, grad_topk_weights = _backward(Op.DISPATCH_BACKWARD, op, ctx.engine.dispatch_backward, tensors, ctx)
    return grad_x, None, grad_topk_weights, None, None


def _save_for_combine_backward(ctx: Any, engine: Engine, tag: int, *tensors: Tensor) -> None:
    ctx.engine, ctx.tag = engine, tag
    ctx.save_for_backward(*tensors)


def _differentiate_combine(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    tensors = (grad_out, *ctx.saved_tensors)
    op = torch.ops.moe_rt.combine_backward.default
    grad_y, grad_recv_weights = _backward(Op.COMBINE_BACKWARD, op, ctx.engine.combine_backward, tensors, ctx)
    return grad_y, grad_recv_weights, None, None, None, None


def _differentiate_twice(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("second derivative of moe_rt's dispatch or combine: got one, expected first ones only")


def _set_up_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, engine, tag = inputs
    _save_for_dispatch_backward(ctx, engine_by_id(engine), tag, output)


def _set_up_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, recv_weights, recv_plan, _, engine, tag = inputs
    _save_for_combine_backward(ctx, engine_by_id(engine), tag, y, recv_weights, recv_plan)


torch.library.register_autograd("moe_rt::dispatch", _differentiate_dispatch, setup_context=_set_up_dispatch, lib=_lib)
torch.library.register_autograd("moe_rt::combine", _differentiate_combine, setup_context=_set_up_combine, lib=_lib)
for _name in ("dispatch_backward", "combine_backward"):
    torch.library.register_autograd(f"moe_rt::{_name}", _differentiate_twice, lib=_lib)


# Saves in forward: torch would bind the arguments of a Function with a setup_context by name, which takes longer than
# the op.
class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, engine: Engine, tag: int
    ) -> tuple[Tensor, ...]:
        output = engine.dispatch(x, topk_idx, topk_weights, tag)
        _save_for_dispatch_backward(ctx, engine, tag, output)
        return output

    backward = staticmethod(_differentiate_dispatch)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: Engine, tag: int
    ) -> Tensor:
        output = engine.combine(y, recv_weights, recv_plan, send_plan, tag)
        _save_for_combine_backward(ctx, engine, tag, y, recv_weights, recv_plan)
        return output

    backward = staticmethod(_differentiate_combine)


def dispatch(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, engine: Engine, tag: int) -> tuple[Tensor, ...]:
    """torch.ops.moe_rt.dispatch: recv_x, recv_weights, offs, recv_plan, send_plan."""
    if _unwatched(x, topk_idx, topk_weights):
        if torch.is_grad_enabled():
            return _Dispatch.apply(x, topk_idx, topk_weights, engine, tag)
        return engine.dispatch(x, topk_idx, topk_weights, tag)
    engine.require_call(Op.DISPATCH, tag, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    return torch.ops.moe_rt.dispatch.default(x, topk_idx, topk_weights, engine.id, tag)


def combine(y: Tensor, recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: Engine, tag: int) -> Tensor:
    """torch.ops.moe_rt.combine: out."""
    if _unwatched(y, recv_weights, recv_plan, send_plan):
        if torch.is_grad_enabled():
            return _Combine.apply(y, recv_weights, recv_plan, send_plan, engine, tag)
        return engine.combine(y, recv_weights, recv_plan, send_plan, tag)
    plans = {"handle.recv_plan": recv_plan, "handle.send_plan": send_plan}
    engine.require_call(Op.COMBINE, tag, y=y, recv_weights=recv_weights, **plans)
    return torch.ops.moe_rt.combine.default(y, recv_weights, recv_plan, send_plan, engine.id, tag)
