"""Gradients of dispatch and combine, and how each op's gradient or its refusal is registered with torch's dispatcher.

dispatch           saves its plans;            backward: dispatch_backward (a combine-type op)
combine            saves y, weights, plans;    backward: combine_backward  (a dispatch-type op)
                   if layout="tokens", saves only the plan; backward: combine_tokens_backward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.library import Library

from moe_rt.engine.differentiation import SECOND_DERIVATIVE, Args, TangentRule, differentiate, has_tangent, refuse_vmap
from moe_rt.engine.engine import Engine, engine_by_id
from moe_rt.errors import InvalidInput, Op

Call: TypeAlias = Callable[..., Any]  # an op, as declared in table.py


class Gradient(NamedTuple):
    """Formulas by which autograd differentiates an op.

    save(ctx, engine, tag, output, inputs) keeps what differentiate(ctx, *grads) needs, which returns the gradients of
    the differentiable inputs; `tangents` is the rule of forward mode.
    """

    save: Callable[[Any, Engine, int, Any, Args], None]
    differentiate: Callable[..., tuple[Tensor | None, ...]]
    tangents: TangentRule

    def after_ticket(self) -> Gradient:
        """Return the gradient of the op's second half, whose first input is a ticket. Tangents were refused before."""

        def save(ctx: Any, engine: Engine, tag: int, output: Any, inputs: Args) -> None:
            self.save(ctx, engine, tag, output, inputs[1:])

        return self._replace(save=save)


def gradient_of_dispatch(backward: Call) -> Gradient:
    """Return the gradient of dispatch, whose backward op is `backward`."""

    def save(ctx: Any, engine: Engine, tag: int, output: tuple[Tensor, ...], inputs: Args) -> None:
        recv_x, _, _, recv_plan, send_plan = output
        ctx.engine, ctx.tag, ctx.capacity = engine, tag, recv_x.shape[0]
        ctx.set_materialize_grads(False)  # only two of the five outputs have gradients
        ctx.save_for_backward(recv_plan, send_plan)

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_recv_x, grad_recv_weights = grads[:2]
        recv_plan, send_plan = ctx.saved_tensors
        engine: Engine = ctx.engine
        spec, capacity = engine.spec, ctx.capacity
        if grad_recv_x is None:
            grad_recv_x = recv_plan.new_zeros(capacity, spec.hidden, dtype=spec.dtype)
        if grad_recv_weights is None:
            grad_recv_weights = recv_plan.new_zeros(engine.weights_shape(capacity), dtype=spec.acc_dtype)
        return backward(grad_recv_x, grad_recv_weights, recv_plan, send_plan, engine, ctx.tag)

    return Gradient(save, differentiate, _tangents_of_dispatch)


def gradient_of_combine(backward: Call, tokens_backward: Call) -> Gradient:
    """Return the gradient of combine; `tokens_backward` is its backward op for rows of tokens."""

    def save(ctx: Any, engine: Engine, tag: int, output: Tensor, inputs: Args) -> None:
        y, recv_weights, recv_plan, _ = inputs
        ctx.engine, ctx.tag = engine, tag
        if recv_weights is None:
            ctx.num_rows = y.shape[0]
            ctx.save_for_backward(recv_plan)
        else:
            ctx.save_for_backward(y, recv_weights, recv_plan)

    def differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *rows, recv_plan = ctx.saved_tensors
        if not rows:
            return tokens_backward(grad_out, recv_plan, ctx.num_rows, ctx.engine, ctx.tag), None
        return backward(grad_out, *rows, recv_plan, ctx.engine, ctx.tag)

    return Gradient(save, differentiate, _tangents_of_combine)


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


class Refusals:
    """Refusals of one op's calls: it raises on every rank, in place of the op."""

    def __init__(self, name: str, kind: Op, engine_at: int) -> None:
        self.name, self.kind, self.engine_at = name, kind, engine_at

    def engine_and_tag(self, args: Args) -> tuple[Engine, int]:
        """Return the engine and the tag of the op's arguments in the dispatcher."""
        return engine_by_id(args[self.engine_at]), args[self.engine_at + 1]

    def refuse(self, message: str, args: Args) -> NoReturn:
        """Raise InvalidInput on every rank, in place of the op."""
        engine, tag = self.engine_and_tag(args)
        engine._refuse(self.kind, tag, InvalidInput(message, rank=engine.rank, op=self.kind), 0, 0)

    def refuse_tangents(self, args: Args, _: Args) -> NoReturn:
        self.refuse(f"{self.name}: {SECOND_DERIVATIVE}", args)

    def refuse_twice(self, ctx: Any, *_: Any) -> NoReturn:
        self.refuse_tangents(ctx.inputs, ())

    def plain_rows(self, rule: TangentRule) -> TangentRule:
        """Return `rule`, guarded: it refuses buffers that code rows, because codes have no derivatives."""

        def rule_or_refusal(args: Args, tangents: Args) -> Any:
            engine, tag = self.engine_and_tag(args)
            engine.refuse_recorded_window(tag, args[0])
            if engine.spec.dispatch_dtype is not None or engine.spec.combine_dtype is not None:
                got = "tangents in a buffer with a dispatch_dtype or combine_dtype"
                self.refuse(f"{self.name}: got {got}, expected none, as codes have no derivatives", args)
            return rule(args, tangents)

        return rule_or_refusal


def register_gradient(lib: Library, refusals: Refusals, gradient: Gradient, backward: Callable[..., Any]) -> None:
    """Register an op's gradient with torch's dispatcher; `backward` returns those of all arguments."""

    def set_up(ctx: Any, inputs: Args, output: Any) -> None:
        gradient.save(ctx, *refusals.engine_and_tag(inputs), output, inputs[: refusals.engine_at])

    rule = refusals.plain_rows(gradient.tangents)
    differentiate(lib, refusals.name, backward, set_up, tangents=rule, refuse=refusals.refuse)


def register_once(lib: Library, refusals: Refusals) -> None:
    """Register an op that is a derivative: a second one is refused."""

    def set_up(ctx: Any, inputs: Args, output: Any) -> None:
        ctx.inputs = tuple(None if isinstance(t, Tensor) else t for t in inputs)

    twice, tangents = refusals.refuse_twice, refusals.refuse_tangents
    differentiate(lib, refusals.name, twice, set_up, tangents=tangents, refuse=refusals.refuse)


def register_lossy(lib: Library, refusals: Refusals, require_no_loss: Callable[..., None]) -> None:
    """Register an op without gradients; `require_no_loss` first refuses a call that would lose some."""
    op = getattr(torch.ops.moe_rt, refusals.name).default

    def run(*args: Any, **out: Any) -> Any:
        require_no_loss(*args, **out)
        if any(has_tangent(t) for t in (*args, *out.values())):
            refusals.refuse(f"{refusals.name}: got tangents, expected none", args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **out)

    lib.impl(refusals.name, run, "Autograd")
    refuse_vmap(lib, refusals.name, refusals.refuse)
