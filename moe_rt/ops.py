"""The torch ops: dispatch, combine and their backwards, with fakes and autograd.

    dispatch           saves its plans;            backward: dispatch_backward (a combine-type op)
    combine            saves y, weights, plans;    backward: combine_backward  (a dispatch-type op)

Ops are functional and return fresh tensors of static shape, so that autograd, checkpointing and torch.compile see
nothing unusual. A buffer is named by an integer, its engine's id. Rows past `offs[-1]` are never written nor read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt.native.engine import engine_by_id

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


def _save_for_dispatch_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.engine, ctx.tag = inputs[3:]
    ctx.save_for_backward(output[3], output[4])


def _differentiate_dispatch(
    ctx: Any, grad_recv_x: Tensor, grad_recv_weights: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    recv_plan, send_plan = ctx.saved_tensors
    grad_x, grad_topk_weights = torch.ops.moe_rt.dispatch_backward(
        grad_recv_x, grad_recv_weights, recv_plan, send_plan, ctx.engine, ctx.tag
    )
    return grad_x, None, grad_topk_weights, None, None


def _save_for_combine_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, recv_weights, recv_plan, _, ctx.engine, ctx.tag = inputs
    ctx.save_for_backward(y, recv_weights, recv_plan)


def _differentiate_combine(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    y, recv_weights, recv_plan = ctx.saved_tensors
    grad_y, grad_recv_weights = torch.ops.moe_rt.combine_backward(
        grad_out, y, recv_weights, recv_plan, ctx.engine, ctx.tag
    )
    return grad_y, grad_recv_weights, None, None, None, None


torch.library.register_autograd(
    "moe_rt::dispatch", _differentiate_dispatch, setup_context=_save_for_dispatch_backward, lib=_lib
)
torch.library.register_autograd(
    "moe_rt::combine", _differentiate_combine, setup_context=_save_for_combine_backward, lib=_lib
)
