"""What one rank does in a session: makes a buffer, runs verified training steps, and says what ended them and when."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from moe_rt import faults
from moe_rt.buffer import Buffer
from moe_rt.errors import MoeRtError
from moe_rt.heap.groups import Group
from moe_rt.heap.rendezvous import ThreadGroup

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 8, 32, 2, 2
OPS_OF_A_STEP = 4  # dispatch, combine, combine_backward, dispatch_backward
INIT_TIMEOUT_S = 0.5  # when a rank is to stay away; otherwise a loaded machine may take its time
PATIENCE_S = 60.0
_NOBODY_LOOKS = memoryview(bytearray(8)).cast("d")


class WrongData(Exception):
    """An op returned without an error, but not what it should."""


def serve(orders: int, reports: int, began: memoryview[float]) -> None:
    """Runs sessions until the other end of `orders` is closed. One line in, one line out.

    Orders: store (a path), rank, size (of the process group), steps, fault (for MOE_RT_FAULT), timeout_s. The report:
    raised (the error's class, "nothing" or "wrong data"), message, at (when, monotonic), made (whether there was a
    buffer), steps done, then (what the next step raises), segments and fds left behind.
    """
    torch.set_num_threads(1)
    os.environ[faults.VARIABLE] = ""  # only sessions are struck
    _warm_up()
    with os.fdopen(orders) as lines:
        for line in lines:
            order, before = json.loads(line), len(os.listdir("/proc/self/fd"))
            path, rank, size = order["store"], order["rank"], order["size"]
            dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
            # A rank that is struck at once must not cut off one that is still connecting to it.
            store = _get_default_store()
            store.set(f"connected/{rank}", "1")
            store.wait([f"connected/{r}" for r in range(size)])
            report = _session(order, began)
            dist.destroy_process_group()
            gc.collect()
            report["fds"] = len(os.listdir("/proc/self/fd")) - before
            report["segments"] = Path("/proc/self/maps").read_text().count("memfd:moe_rt")
            os.write(reports, json.dumps(report).encode() + b"\n")


def _warm_up() -> None:
    """A process is slow in its first step, when libraries wake up; a short timeout_s must not be spent on that."""
    with _buffer(ThreadGroup.make(1)[0], 1, PATIENCE_S, PATIENCE_S) as buffer:
        _step(buffer, 0, _NOBODY_LOOKS)


def _session(order: dict[str, Any], began: memoryview[float]) -> dict[str, Any]:
    os.environ[faults.VARIABLE] = order["fault"]
    rank, steps = order["rank"], order["steps"]
    away = "pre_rendezvous" in order["fault"] and "stop" in order["fault"]
    leaves_early = "in_destroy" in order["fault"] and f"rank={rank}" in order["fault"]
    buffer: Buffer | None = None
    report: dict[str, Any] = {"raised": "nothing", "steps": 0, "then": "nothing"}
    try:
        began[0] = time.monotonic()
        init_timeout_s = INIT_TIMEOUT_S if away else PATIENCE_S
        buffer = _buffer(dist.group.WORLD, order["size"], order["timeout_s"], init_timeout_s)
        for i in range(steps - 1 if leaves_early else steps):
            _step(buffer, i, began)
            report["steps"] += 1
        began[0] = time.monotonic()
        buffer.close()
    except (MoeRtError, WrongData) as error:
        raised = "wrong data" if isinstance(error, WrongData) else type(error).__name__
        report |= {"raised": raised, "message": str(error), "at": time.monotonic()}
    if buffer is not None and report["raised"] != "nothing":
        try:
            _step(buffer, 0, _NOBODY_LOOKS)
        except (MoeRtError, WrongData) as error:
            report["then"] = type(error).__name__
        buffer.abort()
    report["made"] = buffer is not None
    return report


def _buffer(group: Group, size: int, timeout_s: float, init_timeout_s: float) -> Buffer:
    return Buffer(
        group,
        num_max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        num_experts=EXPERTS_PER_RANK * size,
        dtype=torch.float32,
        timeout_s=timeout_s,
        init_timeout_s=init_timeout_s,
    )


def _step(buffer: Buffer, i: int, began: memoryview[float]) -> None:
    """Forward and backward with integers, whose sums are exact in any order; different data in every step.

    The start of each op is noted, except that both backward ops are one call.
    """
    x, topk_idx = _inputs(buffer.rank, buffer.num_ranks, i)
    topk_weights = torch.ones(topk_idx.shape).requires_grad_()
    began[0] = time.monotonic()
    recv_x, recv_weights, handle = buffer.dispatch(x, topk_idx, topk_weights)
    began[0] = time.monotonic()
    out = buffer.combine(recv_x, recv_weights, handle)
    grad_out = float(i % 5 + 1)
    loss = (out * grad_out).sum()  # a gradient handed to backward() would make every new process import sympy
    began[0] = time.monotonic()
    loss.backward()
    visits = (topk_idx >= 0).sum(1, keepdim=True)
    _expect("out", out, x * visits)
    _expect("grad_x", x.grad, (grad_out * visits).expand_as(x))
    _expect("grad_topk_weights", topk_weights.grad, (grad_out * x).sum(1, keepdim=True) * (topk_idx >= 0))


def _inputs(rank: int, num_ranks: int, i: int) -> tuple[Tensor, Tensor]:
    """x [T, H] and topk_idx [T, K]; T, the choices and some missing ones depend on the rank and the step."""
    num_tokens, num_experts = (5 * rank + 3 * i) % (TOKENS + 1), EXPERTS_PER_RANK * num_ranks
    token = torch.arange(num_tokens)[:, None]
    x = ((token + 7 * i + 3 * rank) % 11 + torch.arange(HIDDEN) % 3).float().requires_grad_()
    first = (token + i + rank) % num_experts
    second = torch.where(token % 4 == 3, -1, (first + 1 + token) % num_experts)
    return x, torch.cat([first, torch.where(second == first, -1, second)], 1)


def _expect(name: str, got: Tensor | None, expected: Tensor) -> None:
    if got is None or not torch.equal(got, expected):
        raise WrongData(name)
