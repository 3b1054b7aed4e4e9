"""Rank functions for tests of failing hosts and links; each returns what its rank saw."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults.cases_faults import good_round, open_buffer
from support.routing import make_spec

from moe_rt import Buffer, _engine
from moe_rt.config.options import Route
from moe_rt.lab.testing.resources import held, left_of
from moe_rt.memory.ucx import await_peers

_FOREVER_S = 800.0
_READS_LATE_S = 0.5
_ROUNDS_S = 0.5  # a few rounds of 64 rows on a link of 200 Mbit/s


def rounds_until_failure(group: Any, begun: str, timeout_s: float, absent_rank: int = -1) -> tuple[str, float]:
    """Run rounds until they fail; return the error and the duration of the last one. A file announces that this rank
    runs.

    The absent rank takes part only in the first round.
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


def stop_for_a_while(group: Any, faulty_rank: int, timeout_s: float, marker: str) -> str:
    """The faulty rank is stopped and resumes when the others have timed out, which a file of each announces."""
    buffer = open_buffer(group, timeout_s=timeout_s)
    good_round(buffer)
    if buffer.rank == faulty_rank:
        stopped, others = os.getpid(), [rank for rank in range(buffer.num_ranks) if rank != faulty_rank]
        if os.fork() == 0:
            await_files(marker, others)
            os.kill(stopped, signal.SIGCONT)
            os._exit(0)
        os.kill(stopped, signal.SIGSTOP)
    try:
        good_round(buffer)
    except RuntimeError as error:
        Path(f"{marker}.{buffer.rank}").touch()
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.close()
    return "no error"


def rows_come_late(group: Any, late_rank: int, timeout_s: float, late_s: float) -> str:
    """The late rank has announced its op, and sends the requested rows when the others have timed out and closed."""
    os.environ["MOE_RT_FAULT"] = f"rank={late_rank},op=1,at=after_all_flags,do=sleep={late_s}"
    buffer = open_buffer(group, make_spec(group.size(), route="two_level"), timeout_s=timeout_s)
    del os.environ["MOE_RT_FAULT"]
    try:
        good_round(buffer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.close()
        await_peers()
    return "no error"


def large_rounds(group: Any, route: Route, faulty_rank: int, seed: int, pause_s: float) -> str:
    """Run rounds that mostly have rows in flight; the faulty rank dies at a random moment. Return the error.

    The other ranks are stopped shortly before and resumed after it, so that they see its last requests and its death.
    """
    buffer, delay_s = open_large_buffer(group, route, _FOREVER_S), random.Random(seed).random() * _ROUNDS_S
    if buffer.rank == faulty_rank:
        threading.Timer(delay_s + pause_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif pause_s > 0:
        stop_this_process(delay_s, lambda: time.sleep(2 * pause_s))
    return end_of_rounds(buffer)


def large_rounds_with_a_stop(
    group: Any, route: Route, faulty_rank: int, seed: int, timeout_s: float, marker: str
) -> str:
    """The faulty rank is stopped at a random moment, and resumes when all others have timed out."""
    buffer = open_large_buffer(group, route, timeout_s)
    if buffer.rank == faulty_rank:
        others = [rank for rank in range(buffer.num_ranks) if rank != faulty_rank]
        stop_this_process(random.Random(seed).random() * _ROUNDS_S, lambda: await_files(marker, others))
    try:
        return end_of_rounds(buffer)
    finally:
        Path(f"{marker}.{buffer.rank}").touch()


def open_large_buffer(group: Any, route: Route, timeout_s: float) -> Buffer:
    spec = make_spec(group.size(), num_max_tokens_per_rank=64, hidden=7168, dtype=torch.bfloat16, route=route)
    buffer = open_buffer(group, spec, timeout_s=timeout_s)
    good_round(buffer)
    group.barrier().wait()
    return buffer


def end_of_rounds(buffer: Buffer) -> str:
    deadline = time.monotonic() + _FOREVER_S
    try:
        while time.monotonic() < deadline:
            good_round(buffer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.close()
    return "no error"


def stop_this_process(delay_s: float, until: Callable[[], None]) -> None:
    """Stop this process from a child after a delay, and resume it once `until` has returned."""
    stopped = os.getpid()
    if os.fork() != 0:
        return
    time.sleep(delay_s)
    os.kill(stopped, signal.SIGSTOP)
    until()
    os.kill(stopped, signal.SIGCONT)
    os._exit(0)


def await_files(stem: str, ranks: list[int]) -> None:
    deadline = time.monotonic() + _FOREVER_S
    while time.monotonic() < deadline and not all(Path(f"{stem}.{rank}").exists() for rank in ranks):
        time.sleep(0.05)


def refused(group: Any, faulty_rank: int) -> str:
    """One rank passes a wrong input, then a round succeeds, then rows overflow, and again a round succeeds."""
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
    """Run a round of two tokens a rank, which fit anywhere."""
    spec = buffer.spec
    x = torch.randn(2, spec.hidden)
    idx = torch.full((2, spec.num_topk), -1, dtype=torch.int64)
    idx[:, 0] = torch.arange(2) * (spec.num_experts - 1)
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(idx.shape))
    assert torch.equal(buffer.combine(recv_x, recv_weights, handle), x)


def the_last_op_is_read_late(group: Any, marker: str) -> bool:
    """Rank 1 reads what the others announced last when they have closed. Return whether this rank's end came after."""
    with open_buffer(group) as buffer:
        spec = buffer.spec
        nothing = torch.zeros(0, spec.hidden), torch.zeros(0, spec.num_topk, dtype=torch.int64)
        pending = buffer.dispatch(*nothing, torch.ones(0, spec.num_topk), wait=False)
        if buffer.rank == 1:
            await_files(marker, [rank for rank in range(buffer.num_ranks) if rank != 1])
            time.sleep(_READS_LATE_S)
            Path(f"{marker}.1").touch()
        pending.wait()
    if buffer.rank != 1:
        Path(f"{marker}.{buffer.rank}").touch()
    _engine.await_networks(_FOREVER_S)
    return Path(f"{marker}.1").exists()


def left_of_buffers(group: Any, times: int) -> dict[str, int]:
    """Return what this process has open after `times` more buffers, beyond what it had after the first three."""
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
    """Wait until no closed buffer of any rank serves a peer."""
    group.barrier().wait()
    await_peers()
