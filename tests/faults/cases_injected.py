"""Rank functions for tests of injected faults and of ranks that raise without a context manager."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from faults.cases_faults import good_round, open_buffer

from moe_rt import Buffer
from moe_rt.errors import MoeRtError


def step(buffer: Buffer, i: int) -> None:
    """Run forward and backward, four ops, with different data in every step, so that a skipped op is noticed."""
    x = torch.full((6, buffer.spec.hidden), i + 1.0, requires_grad=True)
    idx = torch.arange(18).reshape(6, 3) % buffer.spec.num_experts
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(6, 3))
    out = buffer.combine(recv_x, recv_weights, handle)
    (out * (i + 1.0)).sum().backward()
    assert torch.equal(out, 3.0 * x.detach())
    assert torch.equal(x.grad, 3.0 * x.detach())


def three_steps(group: Any, num_threads: int = 1, **options: Any) -> str:
    """Run three training steps with the environment's fault; return this rank's error."""
    try:
        buffer = open_buffer(group, num_threads=num_threads, **options)
        for i in range(3):
            step(buffer, i)
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def three_steps_with(group: Any, fault: str) -> str:
    """Run the same on processes, each of which has an environment; a stopped rank is waited for."""
    os.environ["MOE_RT_FAULT"] = fault
    try:
        return three_steps(group, timeout_s=500.0)
    finally:
        del os.environ["MOE_RT_FAULT"]


def raise_in_backward(group: Any, faulty_rank: int) -> str:
    """The faulty rank's code raises inside backward, between its two ops."""

    def hook(grad: torch.Tensor) -> None:
        raise KeyError("the user's own mistake")

    try:
        with open_buffer(group) as buffer:
            x = torch.ones(6, buffer.spec.hidden, requires_grad=True)
            idx = torch.zeros(6, 3, dtype=torch.int64)
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(6, 3))
            if buffer.rank == faulty_rank:
                recv_x.register_hook(hook)
            buffer.combine(recv_x, recv_weights, handle).sum().backward()
            good_round(buffer)
    except (MoeRtError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def raise_without_with(group: Any, faulty_rank: int) -> None:
    """The faulty rank's code raises, and its buffer goes with the frame."""
    buffer = open_buffer(group)
    good_round(buffer)
    if buffer.rank == faulty_rank:
        raise KeyError("the user's own mistake")
    start = time.monotonic()
    try:
        good_round(buffer)
    except MoeRtError as error:
        # Print with a single write: print writes the line end separately, and ranks may be threads.
        print(f"{type(error).__name__} after {time.monotonic() - start:.3f} s\n", end="", flush=True)
