"""Rank functions that use another buffer's handles, and handles changed after dispatch returned them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from faults.cases_faults import good_round, open_buffer
from support.ranks import meet
from support.routing import make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.buffer.handle import Handle

TOKENS = 9
OPS = ("combine", "combine_backward", "dispatch_backward")


def dispatched(buffer: Buffer, num_tokens: int = TOKENS) -> tuple[Tensor, Tensor, Handle]:
    """Dispatch rows from every rank to every rank."""
    inputs = make_inputs(buffer.spec, [num_tokens] * buffer.num_ranks, 5, "topk")
    x, idx, weights = (each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))
    return buffer.dispatch(x, idx, weights)


def outcome(buffer: Buffer, op: str, recv_x: Tensor, recv_weights: Tensor, handle: Handle) -> str:
    """Run one op; return this rank's "<error class>: <message>"."""
    engine, plans = buffer._engine, (handle.recv_plan, handle.send_plan)
    calls: dict[str, Callable[[], Any]] = {
        "combine": lambda: buffer.combine(recv_x, recv_weights, handle),
        "combine_backward": lambda: engine.combine_backward(
            torch.zeros(len(handle.send_plan), buffer.spec.hidden), recv_x, recv_weights, handle.recv_plan, handle.tag
        ),
        "dispatch_backward": lambda: engine.dispatch_backward(recv_x, recv_weights, *plans, handle.tag),
    }
    try:
        calls[op]()
        buffer.check()  # kernels report errors here, after the op
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def another_buffers(group: Any, faulty_rank: int, op: str, fault_continues: bool) -> str:
    """The faulty rank's handle is from an equal dispatch, with the same sequence number, on a second buffer of equal
    sizes."""
    with open_buffer(group) as buffer, open_buffer(group) as second:
        (recv_x, recv_weights, handle), (_, _, foreign) = dispatched(buffer), dispatched(second)
        meet(group)
        text = outcome(buffer, op, recv_x, recv_weights, foreign if buffer.rank == faulty_rank else handle)
        if fault_continues:
            good_round(buffer)
        return text


def other_sizes(group: Any, faulty_rank: int) -> str:
    """The faulty rank's handle is from a buffer with other experts, and its plan has the same length."""
    size = group.size if isinstance(group.size, int) else group.size()
    with open_buffer(group) as buffer, open_buffer(group, make_spec(size, hidden=12)) as second:
        (recv_x, recv_weights, handle), (_, _, foreign) = dispatched(buffer), dispatched(second)
        text = outcome(buffer, "combine", recv_x, recv_weights, foreign if buffer.rank == faulty_rank else handle)
        good_round(buffer)
        return text


def places(buffer: Buffer) -> dict[str, tuple[str, int]]:
    """Return name -> (tensor, index) of the numbers of cuda/protocol/core/plan.h."""
    spec, head = buffer.spec, 12
    rows = head + 4 * spec.num_ranks * spec.num_max_tokens_per_rank
    ks = rows + (buffer._engine.plan_ints - rows) // 2
    names = ["mark", "num_tokens", "num_pulled", "num_copies", "capacity", "first_own", "num_own", "num_rows"]
    at = dict(zip(names, [0, 4, 5, 6, 8, 9, 10, 11], strict=True))
    at |= {"token": head, "source and slot": head + 1, "first": head + 2, "copies": head + 3, "row": rows, "k": ks}
    return {name: ("recv_plan", where) for name, where in at.items()} | {"sent": ("send_plan", 1)}


def first_refused(buffer: Buffer, handle: Handle) -> dict[str, tuple[str, int]]:
    """Return, for each bounded number, its name in `places` and the least value that is out of bounds."""
    spec, head = buffer.spec, handle.recv_plan.tolist()
    num_ranks, num_topk, copies_at = spec.num_ranks, spec.num_topk, places(buffer)["copies"][1]
    num_slots, pulled, copies = min(num_topk, num_ranks), num_ranks * spec.num_max_tokens_per_rank, head[6]
    return {
        "token": ("token", spec.num_max_tokens_per_rank),
        "source": ("source and slot", num_ranks),
        "slot": ("source and slot", num_slots << 16),
        "copies": ("copies", num_topk + 1),
        "first": ("first", copies - head[copies_at] + 1),
        "row": ("row", head[11]),
        "k": ("k", num_topk),
        "sent slot": ("sent", num_slots),
        "sent k": ("sent", num_topk << 16),
        "num_tokens": ("num_tokens", head[4] + 1),
        "num_pulled": ("num_pulled", pulled + 1),
        "num_copies": ("num_copies", pulled * min(num_topk, buffer.num_local_experts) + 1),
        "capacity": ("capacity", head[8] + 1),
        "num_rows": ("num_rows", head[8] + 1),
        "first_own": ("first_own", head[5] + 1),
        "num_own": ("num_own", head[5] - head[9] + 1),
    }


def at_the_bound(group: Any, faulty_rank: int, name: str) -> str:
    """One number of the faulty rank's plans is the least value out of bounds."""
    with open_buffer(group) as buffer:
        recv_x, recv_weights, handle = dispatched(buffer)
        if buffer.rank == faulty_rank:
            place, value = first_refused(buffer, handle)[name]
            plan, where = places(buffer)[place]
            damaged = getattr(handle, plan).clone()
            damaged.view(-1)[where] = value
            handle = replace(handle, **{plan: damaged})
        text = outcome(buffer, "combine", recv_x, recv_weights, handle)
        good_round(buffer)
        return text


def overwritten(group: Any, faulty_rank: int, name: str, value: int, fault_continues: bool) -> list[str]:
    """One number of the faulty rank's plans is overwritten; return what this rank saw of each op. The group
    continues."""
    texts = []
    with open_buffer(group) as buffer:
        plan, where = places(buffer)[name]
        for op in OPS if fault_continues else OPS[:1]:
            if plan == "send_plan" and op == "combine_backward":
                continue  # has no such number
            recv_x, recv_weights, handle = dispatched(buffer)
            meet(group)
            if buffer.rank == faulty_rank:
                damaged = getattr(handle, plan).clone()
                damaged.view(-1)[where] = value
                handle = replace(handle, **{plan: damaged})
            texts.append(outcome(buffer, op, recv_x, recv_weights, handle))
            if fault_continues:
                good_round(buffer)
    return texts


def odd_plans(group: Any, faulty_rank: int) -> list[str]:
    """Use plans with the right sizes but too little memory."""
    texts = []
    with open_buffer(group) as buffer:
        for odd in (
            lambda plan: torch.zeros(1, dtype=torch.int32).expand(plan.shape),
            lambda plan: torch._efficientzerotensor(plan.shape, dtype=torch.int32),
            lambda plan: torch.zeros(plan.shape, dtype=torch.int32),
            lambda plan: plan.numpy(),
        ):
            recv_x, recv_weights, handle = dispatched(buffer)
            if buffer.rank == faulty_rank:
                handle = replace(handle, recv_plan=odd(handle.recv_plan))
            texts.append(outcome(buffer, "combine", recv_x, recv_weights, handle))
            good_round(buffer)
    return texts


def fewer_tokens(group: Any, faulty_rank: int) -> str:
    """The faulty rank's send plan was cut."""
    with open_buffer(group) as buffer:
        recv_x, recv_weights, handle = dispatched(buffer)
        if buffer.rank == faulty_rank:
            handle = replace(handle, send_plan=handle.send_plan[:4])
        text = outcome(buffer, "combine", recv_x, recv_weights, handle)
        good_round(buffer)
        return text


def moved_plans(group: Any) -> None:
    """Copied plans, and a strided plan, work like the originals."""
    with open_buffer(group) as buffer:
        recv_x, recv_weights, handle = dispatched(buffer)
        expected = buffer.combine(recv_x, recv_weights, handle)
        plans = {
            "recv_plan": torch.stack([handle.recv_plan, handle.recv_plan], 1)[:, 0],
            "send_plan": handle.send_plan.t().contiguous().t(),
        }
        assert torch.equal(buffer.combine(recv_x, recv_weights, replace(handle, **plans)), expected)
