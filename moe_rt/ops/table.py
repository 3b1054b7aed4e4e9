"""The torch ops: dispatch, combine and their backward ops, with fake implementations and autograd (autograd.py).

Ops are functional and return fresh tensors of static shape, so that autograd, checkpointing and torch.compile see
nothing unusual; only combine_out writes to an argument. It has no gradients, nor has dispatch_scaled, whose rows are
codes. Rows past `offs[-1]` are neither written nor read.

torch's dispatcher, and the Python that it runs around an op for autograd, take several times as long as exchanging one
token. They are needed only to trace, transform or observe ops; such ops name a buffer by its engine's id, an integer
that a graph can hold. In all other cases `dispatch` and `combine` call the engine directly, with the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_rt.config.codec import RowFormat
from moe_rt.engine.engine import Engine, engine_by_id
from moe_rt.errors import Op
from moe_rt.ops.autograd import CombineFunction, DispatchFunction, recorded, register_gradients, unwatched
from moe_rt.ops.compile import tells_inductor

_lib = torch.library.Library("moe_rt", "FRAGMENT")

_lib.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor topk_weights, int engine, int tag, int? max_tokens=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_lib.define(
    "dispatch_scaled(Tensor x, Tensor? scales, Tensor topk_idx, Tensor topk_weights, int engine, int tag, "
    "int? max_tokens=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_lib.define(
    "combine(Tensor y, Tensor? recv_weights, Tensor recv_plan, Tensor send_plan, int engine, int tag) -> Tensor"
)
_lib.define(
    "combine_out(Tensor y, Tensor? recv_weights, Tensor recv_plan, Tensor send_plan, int engine, int tag, *, "
    "Tensor(a!) out) -> ()"
)
_lib.define(
    "dispatch_backward(Tensor grad_recv_x, Tensor grad_recv_weights, Tensor recv_plan, Tensor send_plan, int engine, "
    "int tag) -> (Tensor, Tensor)"
)
_lib.define(
    "combine_backward(Tensor grad_out, Tensor y, Tensor recv_weights, Tensor recv_plan, int engine, int tag) -> "
    "(Tensor, Tensor)"
)
_lib.define(
    "combine_tokens_backward(Tensor grad_out, Tensor recv_plan, SymInt num_rows, int engine, int tag) -> Tensor"
)


def _dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, engine: int, tag: int, max_tokens: int | None = None
) -> tuple[Tensor, ...]:
    e = engine_by_id(engine)
    e.require_window_as_handed_out(tag, x)
    return e.dispatch(x, topk_idx, topk_weights, tag, max_tokens)


def _dispatch_scaled(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    engine: int,
    tag: int,
    max_tokens: int | None = None,
) -> tuple[Tensor, ...]:
    return engine_by_id(engine).dispatch(x, topk_idx, topk_weights, tag, max_tokens, True, scales)


def _combine(
    y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int
) -> Tensor:
    return engine_by_id(engine).combine(y, recv_weights, recv_plan, send_plan, tag)


def _combine_out(
    y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int, *, out: Tensor
) -> None:
    engine_by_id(engine).combine(y, recv_weights, recv_plan, send_plan, tag, out)


def _dispatch_backward(
    grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor]:
    return engine_by_id(engine).dispatch_backward(grad_recv_x, grad_recv_weights, recv_plan, send_plan, tag)


def _combine_backward(
    grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor]:
    return engine_by_id(engine).combine_backward(grad_out, y, recv_weights, recv_plan, tag)


def _combine_tokens_backward(grad_out: Tensor, recv_plan: Tensor, num_rows: int, engine: int, tag: int) -> Tensor:
    return engine_by_id(engine).combine_tokens_backward(grad_out, recv_plan, num_rows, tag)


_implementations = {
    "dispatch": _dispatch,
    "dispatch_scaled": _dispatch_scaled,
    "combine": _combine,
    "combine_out": _combine_out,
    "dispatch_backward": _dispatch_backward,
    "combine_backward": _combine_backward,
    "combine_tokens_backward": _combine_tokens_backward,
}
for _name, _impl in _implementations.items():
    for _key in ("CPU", "CUDA"):  # the engine knows its device
        _lib.impl(_name, _impl, _key)
_ops = [getattr(torch.ops.moe_rt, _name).default for _name in _implementations]


def _fake(name: str) -> Callable[..., Any]:
    register = torch.library.register_fake(f"moe_rt::{name}", lib=_lib)
    return lambda shapes: register(tells_inductor(_ops, shapes))


@_fake("dispatch")
def _fake_dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, engine: int, tag: int, max_tokens: int | None = None
) -> tuple[Tensor, ...]:
    e = engine_by_id(engine)
    capacity = e.capacity_for(None if max_tokens is None else int(max_tokens))  # a graph is specialised for this bound
    return (
        x.new_empty(capacity, e.spec.hidden),
        topk_weights.new_empty(e.weights_shape(capacity)),
        x.new_empty(e.num_parts, dtype=torch.int32),
        x.new_empty(e.plan_ints, dtype=torch.int32),
        x.new_empty(x.shape[0], e.spec.num_topk, dtype=torch.int32),
    )


@_fake("dispatch_scaled")
def _(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    engine: int,
    tag: int,
    max_tokens: int | None = None,
) -> tuple[Tensor, ...]:
    spec = engine_by_id(engine).spec
    row = RowFormat.of_codec(spec.dispatch_dtype, spec.hidden) if scales is None else RowFormat.of(x, scales)
    recv_x, *others = _fake_dispatch(x, topk_idx, topk_weights, engine, tag, max_tokens)
    codes = x.new_empty(recv_x.shape[0], row.num_codes, dtype=row.codes)
    return codes, *others, x.new_empty(recv_x.shape[0], row.num_scales, dtype=row.scales)


@_fake("combine")
def _(y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int) -> Tensor:
    return y.new_empty(send_plan.shape[0], y.shape[1])


@_fake("combine_out")
def _(
    y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int, *, out: Tensor
) -> None:
    return None


@_fake("dispatch_backward")
def _(
    grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor]:
    return grad_recv_x.new_empty(send_plan.shape[0], grad_recv_x.shape[1]), grad_recv_weights.new_empty(send_plan.shape)


@_fake("combine_backward")
def _(
    grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, engine: int, tag: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(recv_weights)


@_fake("combine_tokens_backward")
def _(grad_out: Tensor, recv_plan: Tensor, num_rows: int, engine: int, tag: int) -> Tensor:
    return grad_out.new_empty(num_rows, grad_out.shape[1])


register_gradients(_lib)


def _weights(recv_weights: Tensor | None) -> dict[str, Tensor]:
    return {} if recv_weights is None else {"recv_weights": recv_weights}


def dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, engine: Engine, tag: int, max_tokens: int | None
) -> tuple[Tensor, ...]:
    """Run torch.ops.moe_rt.dispatch. Return recv_x, recv_weights, offs, recv_plan, send_plan."""
    if unwatched(x, topk_idx, topk_weights):
        if recorded(x, topk_weights):
            engine.require_no_grad_into_window(tag, x, topk_weights)
            return DispatchFunction.apply(x, topk_idx, topk_weights, engine, tag, max_tokens)
        return engine.dispatch(x, topk_idx, topk_weights, tag, max_tokens)
    engine.require_call(Op.DISPATCH, tag, max_tokens, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    return torch.ops.moe_rt.dispatch.default(x, topk_idx, topk_weights, engine.id, tag, max_tokens)


def dispatch_scaled(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    engine: Engine,
    tag: int,
    max_tokens: int | None,
) -> tuple[Tensor, ...]:
    """Run torch.ops.moe_rt.dispatch_scaled. Return the tensors of dispatch, with codes as recv_x, and recv_scales."""
    engine.require_no_grad_through_codes(tag, x, scales, topk_weights)
    if unwatched(x, x if scales is None else scales, topk_idx, topk_weights):
        return engine.dispatch(x, topk_idx, topk_weights, tag, max_tokens, True, scales)
    parts = {"x": x} if scales is None else {"x[0], codes": x, "x[1], scales": scales}
    engine.require_call(Op.DISPATCH, tag, max_tokens, **parts, topk_idx=topk_idx, topk_weights=topk_weights)
    return torch.ops.moe_rt.dispatch_scaled.default(x, scales, topk_idx, topk_weights, engine.id, tag, max_tokens)


def combine(
    y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: Engine, tag: int
) -> Tensor:
    """Run torch.ops.moe_rt.combine. Return out [T, H]."""
    if unwatched(y, y if recv_weights is None else recv_weights, recv_plan, send_plan):
        if recorded(y, recv_weights):
            return CombineFunction.apply(y, recv_weights, recv_plan, send_plan, engine, tag)
        return engine.combine(y, recv_weights, recv_plan, send_plan, tag)
    plans = {"handle.recv_plan": recv_plan, "handle.send_plan": send_plan}
    engine.require_call(Op.COMBINE, tag, y=y, **_weights(recv_weights), **plans)
    return torch.ops.moe_rt.combine.default(y, recv_weights, recv_plan, send_plan, engine.id, tag)


def combine_out(
    y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, engine: Engine, tag: int, out: Tensor
) -> Tensor:
    """Run torch.ops.moe_rt.combine_out. Return its `out`."""
    engine.require_no_grad(tag, y, recv_weights, out)
    if unwatched(y, y if recv_weights is None else recv_weights, recv_plan, send_plan, out):
        return engine.combine(y, recv_weights, recv_plan, send_plan, tag, out)
    plans = {"handle.recv_plan": recv_plan, "handle.send_plan": send_plan}
    engine.require_call(Op.COMBINE, tag, y=y, **_weights(recv_weights), **plans, out=out)
    torch.ops.moe_rt.combine_out.default(y, recv_weights, recv_plan, send_plan, engine.id, tag, out=out)
    return out
