"""Gradients of dispatch and combine, for calls through torch's dispatcher and for calls that bypass it.

dispatch           saves its plans;            backward: dispatch_backward (a combine-type op)
combine            saves y, weights, plans;    backward: combine_backward  (a dispatch-type op)
                   if layout="tokens", saves only the plan; backward: combine_tokens_backward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_tracing, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.library import Library

from moe_rt.engine.differentiation import SECOND_DERIVATIVE, Args, TangentRule, differentiate, has_tangent, refuse_vmap
from moe_rt.engine.engine import Engine, engine_by_id
from moe_rt.errors import InvalidInput, Op


def unwatched(*tensors: Tensor) -> bool:
    """True if torch's dispatcher would only call the engine: eager mode, plain tensors, no modes, no profiler."""
    if (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _is_tracing()
        or _profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return False
    for t in tensors:  # noqa: SIM110, as a generator would take longer than all the checks above
        if type(t) is not Tensor:
            return False
    return True


def recorded(*tensors: Tensor | None) -> bool:
    """True if autograd would record a Function of these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def _backward(kind: Op, op: OpOverload, engine_op: Callable[..., Any], tensors: tuple[Tensor, ...], ctx: Any) -> Any:
    """Run a backward op; through the dispatcher if it is watched, or must refuse to record a second derivative."""
    if not torch.is_grad_enabled() and unwatched(*tensors):
        return engine_op(*tensors, ctx.tag)
    ctx.engine.require_call(kind, ctx.tag, grad=tensors[0])
    return op(*tensors, ctx.engine.id, ctx.tag)


def save_for_dispatch_backward(ctx: Any, engine: Engine, tag: int, output: tuple[Tensor, ...]) -> None:
    recv_x, recv_weights, _, recv_plan, send_plan = output
    ctx.engine, ctx.tag = engine, tag
    ctx.shapes, ctx.dtypes = (recv_x.shape, recv_weights.shape), (recv_x.dtype, recv_weights.dtype)
    ctx.set_materialize_grads(False)  # only two of the five outputs have gradients
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


# Both Functions save tensors in forward: if they had a setup_context, torch would bind the arguments by name, which
# takes longer than the op.
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


def _set_up_dispatch(ctx: Any, inputs: Args, output: tuple[Tensor, ...]) -> None:
    _, _, _, engine, tag, _ = inputs
    save_for_dispatch_backward(ctx, engine_by_id(engine), tag, output)


def _set_up_combine(ctx: Any, inputs: Args, output: Tensor) -> None:
    y, recv_weights, recv_plan, _, engine, tag = inputs
    save_for_combine_backward(ctx, engine_by_id(engine), tag, y, recv_weights, recv_plan)


def _set_up_refusal(ctx: Any, inputs: Args, output: Any) -> None:
    ctx.inputs = tuple(None if isinstance(t, Tensor) else t for t in inputs)


def _tangents_of_dispatch(args: Args, tangents: Args) -> tuple[Tensor | None, ...]:
    """Dispatch the tangents to the same experts."""
    x, topk_idx, topk_weights, *others = args
    rows = torch.zeros_like(x) if tangents[0] is None else tangents[0]
    weights = torch.zeros_like(topk_weights) if tangents[2] is None else tangents[2]
    recv_x, recv_weights, *_ = torch.ops.moe_rt.dispatch.default(rows, topk_idx, weights, *others)
    return recv_x, recv_weights, None, None, None


def _tangents_of_combine(args: Args, tangents: Args) -> Tensor:
    """Combine the weighted tangents of the rows."""
    y, recv_weights, *others = args
    rows, ones = torch.zeros_like(y) if tangents[0] is None else tangents[0], None
    if recv_weights is not None:
        rows = rows * recv_weights[: len(y), None]
        if tangents[1] is not None:
            rows = rows + y * tangents[1][: len(y), None]
        rows, ones = rows.to(y.dtype), torch.ones_like(recv_weights)
    out: Tensor = torch.ops.moe_rt.combine.default(rows, ones, *others)
    return out


class _Calls:
    """Refusals of one op's calls; finds the engine and tag among the op's arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kind = Op[name.removesuffix("_scaled").removesuffix("_out").replace("_tokens", "").upper()]
        arguments = [argument.name for argument in getattr(torch.ops.moe_rt, name).default._schema.arguments]
        self._engine, self._tag = arguments.index("engine"), arguments.index("tag")

    def refuse(self, message: str, args: Args) -> NoReturn:
        """Raise InvalidInput on every rank, in place of the op."""
        engine = engine_by_id(args[self._engine])
        engine._refuse(self._kind, args[self._tag], InvalidInput(message, rank=engine.rank, op=self._kind), 0, 0)

    def refuse_tangents(self, args: Args, _: Args) -> NoReturn:
        self.refuse(f"{self.name}: {SECOND_DERIVATIVE}", args)

    def refuse_twice(self, ctx: Any, *_: Any) -> NoReturn:
        self.refuse_tangents(ctx.inputs, ())

    def plain_rows(self, rule: TangentRule) -> TangentRule:
        """Return `rule`, guarded: it refuses buffers that code rows, because codes have no derivatives."""

        def rule_or_refusal(args: Args, tangents: Args) -> Any:
            engine = engine_by_id(args[self._engine])
            engine.refuse_recorded_window(args[self._tag], args[0])
            if engine.spec.dispatch_dtype is not None or engine.spec.combine_dtype is not None:
                got = "tangents in a buffer with a dispatch_dtype or combine_dtype"
                self.refuse(f"{self.name}: got {got}, expected none, as codes have no derivatives", args)
            return rule(args, tangents)

        return rule_or_refusal


def _below_autograd(calls: _Calls, require: Callable[..., None]) -> Callable[..., Any]:
    """Return an op without gradients; `require` first refuses a call that would lose some."""
    op = getattr(torch.ops.moe_rt, calls.name).default

    def run(*args: Any, **out: Any) -> Any:
        require(*args, **out)
        if any(has_tangent(t) for t in (*args, *out.values())):
            calls.refuse(f"{calls.name}: got tangents, expected none", args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **out)

    return run


def _require_no_grad(
    y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int, *, out: Tensor
) -> None:
    engine_by_id(engine).require_no_grad(tag, y, recv_weights, out)


def _require_no_grad_through_codes(
    x: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor, engine: int, tag: int, *_: int | None
) -> None:
    engine_by_id(engine).require_no_grad_through_codes(tag, x, scales, topk_weights)


def register_gradients(lib: Library) -> None:
    """Register these gradients with torch's dispatcher, and refusals for the ops of `lib` that have none."""
    for name, backward, set_up, rule in (
        ("dispatch", differentiate_dispatch, _set_up_dispatch, _tangents_of_dispatch),
        ("combine", differentiate_combine, _set_up_combine, _tangents_of_combine),
    ):
        calls = _Calls(name)
        differentiate(lib, name, backward, set_up, tangents=calls.plain_rows(rule), refuse=calls.refuse)
    for name in ("dispatch_backward", "combine_backward", "combine_tokens_backward"):
        calls = _Calls(name)
        twice = calls.refuse_twice
        differentiate(lib, name, twice, _set_up_refusal, tangents=calls.refuse_tangents, refuse=calls.refuse)
    for name, require in (("combine_out", _require_no_grad), ("dispatch_scaled", _require_no_grad_through_codes)):
        calls = _Calls(name)
        lib.impl(name, _below_autograd(calls, require), "Autograd")
        refuse_vmap(lib, name, calls.refuse)
