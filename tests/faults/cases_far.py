"""What ranks do in the tests of hosts and links that fail; each returns what its rank saw."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from cases_faults import good_round, open_buffer

from moe_rt import Buffer
from moe_rt.heap.ucx import await_peers
from moe_rt.testing.held import held, left_of

_FOREVER_S = 800.0


def rounds_until_failure(group: Any, begun: str, timeout_s: float, absent_rank: int = -1) -> tuple[str, float]:
    """What ended the rounds, and how long the last one took; a file says that this rank is in the midst of them.

    The absent rank comes to no round but the first.
    """
    buffer = open_buffer(group, timeout_s=timeout_s)
    good_round(buffer)
    Path(f"{begun}.{buffer.rank}").touch()
    if buffer.rank == absent_rank:
        time.sleep(_FOREVER_S)
    start = time.monotonic()
    while start < time.monotonic() + _FOREVER_S:
        start = time.monotonic()
        try:
            good_round(buffer)
        except RuntimeError as error:
            seconds = time.monotonic() - start
            buffer.close()
            return f"{type(error).__name__}: {error}", seconds
    return "no error", 0.0


def stop_for_a_while(group: Any, faulty_rank: int, timeout_s: float, told: str) -> str:
    """The faulty rank goes on when the others have given it up; a file of each says so."""
    buffer = open_buffer(group, timeout_s=timeout_s)
    good_round(buffer)
    if buffer.rank == faulty_rank:
        stopped, others = os.getpid(), [rank for rank in range(buffer.num_ranks) if rank != faulty_rank]
        if os.fork() == 0:
            deadline = time.monotonic() + _FOREVER_S
            while time.monotonic() < deadline and not all(Path(f"{told}.{rank}").exists() for rank in others):
                time.sleep(0.05)
            os.kill(stopped, signal.SIGCONT)
            os._exit(0)
        os.kill(stopped, signal.SIGSTOP)
    try:
        good_round(buffer)
    except RuntimeError as error:
        Path(f"{told}.{buffer.rank}").touch()
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.close()
    return "no error"


def refused(group: Any, faulty_rank: int) -> str:
    """A wrong input of one rank, then a round that is right, then too many rows, and again one that is right."""
    seen = []
    with open_buffer(group, capacity_factor=0.5) as buffer:
        spec = buffer.spec
        expert = spec.num_experts if buffer.rank == faulty_rank else 0
        for wrong in (expert, 0):
            idx = torch.full((spec.num_max_tokens_per_rank, spec.num_topk), -1, dtype=torch.int64)
            idx[:, 0] = wrong
            try:
                x = torch.randn(len(idx), spec.hidden)
                buffer.dispatch(x, idx, torch.ones(idx.shape))
                seen.append("no error")
            except RuntimeError as error:
                seen.append(type(error).__name__)
            quiet_round(buffer)
    return " ".join(seen)


def quiet_round(buffer: Buffer) -> None:
    """Two tokens a rank, which fit anywhere."""
    spec = buffer.spec
    x = torch.randn(2, spec.hidden)
    idx = torch.full((2, spec.num_topk), -1, dtype=torch.int64)
    idx[:, 0] = torch.arange(2) * (spec.num_experts - 1)
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(idx.shape))
    assert torch.equal(buffer.combine(recv_x, recv_weights, handle), x)


def left_of_buffers(group: Any, times: int) -> dict[str, int]:
    """What this process holds after so many more buffers, beyond what it held after some."""
    for _ in range(3):
        with open_buffer(group) as buffer:
            good_round(buffer)
    settle(group)
    before = held()
    for _ in range(times):
        with open_buffer(group) as buffer:
            good_round(buffer)
    settle(group)
    return left_of(before)


def settle(group: Any) -> None:
    """Until no closed buffer of any rank serves a peer any more."""
    group.barrier().wait()
    await_peers()
