"""Operands in memory that ops write: in a token window, or at a plan that `out` would overwrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from conformance.cases_call_options import mine, open_buffer, size_of
from support.ranks import meet
from support.routing import make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.errors import MoeRtError

Move = Callable[[str, Tensor], Tensor]
HIDDEN, TOKENS, FEW = 64, 48, 5  # a window has space for every operand, also for a plan


def in_window(buffer: Buffer, t: Tensor) -> Tensor:
    """Return the same values in memory of a token window."""
    memory = buffer.token_window(TOKENS).flatten().view(torch.uint8)
    return memory[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def dispatch(buffer: Buffer, move: Move) -> tuple[Tensor, ...]:
    """Only ids and weights move: test_token_window.py covers rows in windows."""
    x, idx, weights = given(buffer)
    return buffer._engine.dispatch(x, move("topk_idx", idx), move("topk_weights", weights), 0)


def dispatch_of_narrow_ids(buffer: Buffer, move: Move) -> tuple[Tensor, ...]:
    x, idx, weights = given(buffer)
    return buffer._engine.dispatch(x, move("topk_idx", idx.int()), weights, 0)


def dispatch_of_codes(buffer: Buffer, move: Move) -> tuple[Tensor, ...]:
    _, idx, weights = given(buffer)
    codes, scales = torch.zeros(len(idx), HIDDEN, dtype=torch.uint8), torch.ones(len(idx), 2)
    codes, scales = move("x", codes), move("x[1], scales", scales)
    return buffer._engine.dispatch(codes, idx, weights, 0, scaled=True, scales=scales)


def combine(buffer: Buffer, move: Move) -> Tensor:
    recv_x, recv_weights, _, *plans = buffer._engine.dispatch(*given(buffer), 0)
    factors = None if buffer.spec.by_token else move("recv_weights", recv_weights)
    plans = move("handle.recv_plan", plans[0]), move("handle.send_plan", plans[1])
    out = move("out", torch.zeros(len(plans[1]), HIDDEN))
    return buffer._engine.combine(move("y", recv_x[:TOKENS]), factors, *plans, 0, out=out)


def dispatch_backward(buffer: Buffer, move: Move) -> tuple[Tensor, Tensor]:
    recv_x, recv_weights, _, *plans = buffer._engine.dispatch(*given(buffer), 0)
    grads = move("grad_recv_x", recv_x[:TOKENS]), move("grad_recv_weights", recv_weights)
    plans = move("handle.recv_plan", plans[0]), move("handle.send_plan", plans[1])
    return buffer._engine.dispatch_backward(*grads, *plans, 0)


def combine_backward(buffer: Buffer, move: Move) -> Any:
    x, idx, weights = given(buffer)
    recv_x, recv_weights, _, recv_plan, _ = buffer._engine.dispatch(x, idx, weights, 0)
    grad_out, recv_plan = move("grad_out", torch.ones_like(x)), move("handle.recv_plan", recv_plan)
    if buffer.spec.by_token:
        return buffer._engine.combine_tokens_backward(grad_out, recv_plan, len(recv_x), 0)
    y, factors = move("y", recv_x[:TOKENS]), move("recv_weights", recv_weights)
    return buffer._engine.combine_backward(grad_out, y, factors, recv_plan, 0)


OPS = (dispatch, dispatch_of_narrow_ids, dispatch_of_codes, combine, dispatch_backward, combine_backward)


def given(buffer: Buffer) -> tuple[Tensor, Tensor, Tensor]:
    return mine(make_inputs(buffer.spec, [FEW] * buffer.num_ranks, 1), buffer.rank)


def operands(group: Any, op: Callable[..., Any], layout: str) -> list[str]:
    """Return the names of an op's operands; the op accepts each in ordinary memory."""
    with opened(group, layout) as buffer:
        names: list[str] = []
        op(buffer, lambda name, t: names.append(name) or t)
    return names


def refused(group: Any, op: Callable[..., Any], layout: str, operand: str) -> str:
    """Return this rank's error if rank 0's operand is in a window; on a CPU the group then continues."""
    with opened(group, layout) as buffer:
        moved = operand if buffer.rank == 0 else ""
        text = "no error"
        try:
            op(buffer, lambda name, t: in_window(buffer, t) if name == moved else t)
        except MoeRtError as error:
            text = f"{type(error).__name__}: {error}"
        meet(group)
        if buffer.heap != "loopback":
            op(buffer, lambda name, t: t)
    return text


def opened(group: Any, layout: str) -> Any:
    spec = make_spec(size_of(group), hidden=HIDDEN, num_max_tokens_per_rank=TOKENS, layout=layout)
    return open_buffer(group, spec)


def out_near_a_plan(group: Any, name: str, words_apart: int) -> str:
    """Return this rank's error if rank 0 writes its sums `words_apart` words after the end of a plan."""
    with opened(group, "experts") as buffer:
        recv_x, recv_weights, _, *plans = buffer._engine.dispatch(*given(buffer), 0)
        at = ["handle.recv_plan", "handle.send_plan"].index(name)
        num_words, num_sums = plans[at].numel(), FEW * HIDDEN
        room = torch.zeros(num_words + 1 + num_sums, dtype=torch.int32)
        plans[at] = room[:num_words].view(plans[at].shape).copy_(plans[at])
        behind = room[num_words + words_apart :].view(torch.float32)[:num_sums]
        out = behind if buffer.rank == 0 else torch.zeros(num_sums)
        try:
            buffer._engine.combine(recv_x, recv_weights, *plans, 0, out=out.view(FEW, HIDDEN))
        except MoeRtError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
