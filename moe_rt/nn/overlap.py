"""A layer's exchanges while it computes: dispatch's backward under the gradients of the experts' weights.

Of the nodes that are ready, autograd runs the one with the highest sequence number, the newest. Dispatch is therefore
recorded as two nodes: in backward the newer one begins, the older one waits. Nodes of the weights' gradients get a
place between them (moe_rt/ops/late_weights.py). Gradients reach parameters by autograd, so each hook fires once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.memory.heaps import HEAPS
from moe_rt.ops import table as ops
from moe_rt.ops.declare import unwatched
from moe_rt.ops.late_weights import LateWeights

_current = threading.local()


def late_weights() -> LateWeights | None:
    """Return the nodes of this forward's weights; None for the usual ones."""
    return getattr(_current, "weights", None)


@contextmanager
def weights_of(weights: LateWeights | None) -> Iterator[None]:
    """Use these nodes for the weights of experts that run in this block."""
    _current.weights = weights
    try:
        yield
    finally:
        _current.weights = None


def has_gain(buffer: Buffer, experts: nn.Module, rows: Tensor, topk_weights: Tensor) -> bool:
    """Return whether dispatch's backward can overlap with gradients of the experts' weights. Ranks may differ.

    False on one host: the wait for a late rank would only move to the next op. False also if backward hooks of the
    experts, as FSDP2 has, may read these gradients when those of the rows are there.
    """
    if is_dynamo_compiling() or not over_network(buffer) or not torch.is_grad_enabled():
        return False
    if not (rows.requires_grad or topk_weights.requires_grad):
        return False
    if not unwatched(rows, topk_weights) or not any(p.requires_grad for p in experts.parameters()):
        return False
    return not has_backward_hooks(experts)


def has_backward_hooks(experts: nn.Module) -> bool:
    """Return whether hooks run when the gradients of the rows are there, and may read those of the weights."""
    return is_sharded(experts) or any(m._backward_hooks or m._backward_pre_hooks for m in experts.modules())


def is_sharded(experts: nn.Module) -> bool:
    """Return whether FSDP2 gathers the weights whenever the experts are called."""
    from torch.distributed.fsdp import FSDPModule  # here, since it would slow the import of MoELayer by a second

    return any(isinstance(m, FSDPModule) for m in experts.modules())


def over_network(buffer: Buffer) -> bool:
    """Return whether rows travel between the halves."""
    traits = HEAPS[buffer.heap]
    return buffer.num_ranks > 1 and traits.network and not traits.gpu  # on GPUs nothing was measured


def dispatch(
    buffer: Buffer,
    rows: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    tag: int,
    meanwhile: Callable[[], object] | None,
) -> tuple[Tensor, Tensor, Handle, LateWeights]:
    """Run buffer.dispatch, and `meanwhile` between its halves. Return its results, and nodes of weights between the
    halves of its backward, where the backward of `meanwhile` runs also."""
    exchange = Exchange(buffer, tag)
    buffer._engine.refuse_recorded_window(tag, rows)
    rows, topk_weights = DispatchFinish.apply(rows, topk_weights.to(buffer.spec.acc_dtype), exchange)
    if meanwhile is None:
        exchange.receive = lambda: buffer.dispatch(rows, topk_idx, topk_weights, tag=tag)
    else:
        with torch.no_grad():
            exchange.receive = buffer.dispatch(rows, topk_idx, topk_weights, tag=tag, wait=False).wait
        meanwhile()
    place = free_place(rows)
    recv_x, recv_weights = DispatchBegin.apply(rows, topk_weights, exchange)
    handle = exchange.handle
    del exchange.handle  # the graph has saved what it needs
    return recv_x, recv_weights, handle, LateWeights(place)


def free_place(rows: Tensor) -> int | None:
    """Return a sequence number between those of earlier and of later nodes; None if `rows` needs no gradient."""
    unused = rows.view_as(rows).grad_fn
    return None if unused is None else unused._sequence_nr()


class Exchange:
    """A dispatch or combine, and its backward op while that is under way.

    Attributes:
        receive: runs the op, or its second half; called once.
        handle: that of the dispatch.
        begun: arguments of the second half of the backward op.
    """

    receive: Callable[[], Any]
    handle: Handle
    begun: tuple[Any, ...]

    def __init__(self, buffer: Buffer, tag: int) -> None:
        self.buffer, self.tag = buffer, tag

    def received(self) -> Any:
        """Return what `receive` returns, and forget it: it holds tensors of the graph."""
        receive = self.receive
        del self.receive
        return receive()

    def waited_for(self, finish: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return what the second half of the backward op returns."""
        grads = finish(*self.begun)
        self.begun = ()
        return grads


# The names say "dispatch", at which walks of the graph from combine's input stop (moe_rt/buffer/replicas.py).
class DispatchFinish(torch.autograd.Function):
    """Identity, whose backward waits for dispatch's backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, topk_weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return rows.view_as(rows), topk_weights.view_as(topk_weights)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.exchange.waited_for(ops.dispatch_backward_finish), None


class DispatchBegin(torch.autograd.Function):
    """Dispatch, whose backward begins dispatch's backward and returns gradients that nothing reads."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, topk_weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        recv_x, recv_weights, exchange.handle = exchange.received()
        ctx.exchange = exchange
        ctx.save_for_backward(exchange.handle.recv_plan, exchange.handle.send_plan)
        return recv_x, recv_weights

    @staticmethod
    def backward(ctx: Any, grad_recv_x: Tensor, grad_recv_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        exchange: Exchange = ctx.exchange
        recv_plan, send_plan = ctx.saved_tensors
        given = grad_recv_x, grad_recv_weights, recv_plan, send_plan, exchange.buffer._engine, exchange.tag
        exchange.begun = (ops.dispatch_backward_begin(*given), *given)
        num_tokens, num_topk = send_plan.shape
        grad_rows = _unread(grad_recv_x, num_tokens, grad_recv_x.shape[1])
        return grad_rows, _unread(grad_recv_weights, num_tokens, num_topk), None


class CombineFinish(torch.autograd.Function):
    """Identity, whose backward waits for combine's backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, recv_weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return y.view_as(y), recv_weights.view_as(recv_weights)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.exchange.waited_for(ops.combine_backward_finish), None


class CombineBegin(torch.autograd.Function):
    """Combine, whose backward begins combine's backward and returns gradients that nothing reads."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(y, recv_weights, recv_plan)
        out: Tensor = exchange.received()
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        exchange: Exchange = ctx.exchange
        y, recv_weights, recv_plan = ctx.saved_tensors
        given = grad_out, y, recv_weights, recv_plan, exchange.buffer._engine, exchange.tag
        exchange.begun = (ops.combine_backward_begin(*given), *given)
        return _unread(y, *y.shape), _unread(recv_weights, *recv_weights.shape), None, None


def _unread(like: Tensor, *shape: int) -> Tensor:
    return like.new_zeros(()).expand(shape)
