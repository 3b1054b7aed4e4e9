"""Rank functions for tests of long waits: signals, freezing, sleeping lanes; each returns what its rank saw."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from faults.cases_faults import await_wait, good_round, open_buffer
from support.routing import buffer_kwargs, make_spec

from moe_rt import Buffer

PATIENCE_S = 600.0


class Alarm(Exception):
    """Raised by a user's signal handler."""


def wait_for(path: str) -> None:
    """Return once the file exists: ranks and the test synchronise through files."""
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)


def send_in_wait(number: int, buffer: Buffer, op: str) -> None:
    """Send this process a signal as soon as this thread waits in an op of this kind, not before."""

    def send() -> None:
        await_wait(buffer, op)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


def interrupted_at(group: Any, at: str, num_threads: int, directory: str) -> str:
    """Rank 0 is interrupted while it waits for rank 1, which arrives only after rank 0 has left its wait."""
    buffer = open_buffer(group, num_threads=num_threads)
    x, idx = torch.randn(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
    weights = torch.ones(4, buffer.spec.num_topk, requires_grad=True)

    def reach(op: str) -> None:
        if op == at and buffer.rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            send_in_wait(signal.SIGINT, buffer, "combine_backward" if op == "backward" else op)
        elif op == at and buffer.rank == 1:
            wait_for(f"{directory}/out")

    try:
        reach("dispatch")
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        reach("combine")
        out = buffer.combine(recv_x, recv_weights, handle)
        reach("backward")
        out.sum().backward()
        text = "no error"
    except (RuntimeError, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    Path(f"{directory}/out").touch()
    try:
        good_round(buffer)
    except RuntimeError as error:
        text += f" | then {type(error).__name__}: {error}"
    buffer.close()
    with open_buffer(group) as newer:
        good_round(newer)
    return text


def handled(group: Any, raises: bool, directory: str) -> str:
    """A user's handler runs during the wait. Rank 1 arrives once it has run; if it returns, the wait continues."""
    with open_buffer(group) as buffer:
        good_round(buffer)

        def handler(*_: object) -> None:
            Path(f"{directory}/handled").touch()
            if raises:
                raise Alarm("enough")

        before = signal.signal(signal.SIGALRM, handler)
        try:
            if buffer.rank == 0:
                send_in_wait(signal.SIGALRM, buffer, "dispatch")
            else:
                wait_for(f"{directory}/handled")
            good_round(buffer)
        except (RuntimeError, Alarm) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            signal.signal(signal.SIGALRM, before)
    return "no error"


def frozen_together(group: Any, timeout_s: float, directory: str) -> str:
    """The other ranks wait for the last one when the test stops all; the last one arrives when all have been
    resumed."""
    with open_buffer(group, timeout_s=timeout_s) as buffer:
        good_round(buffer)
        Path(f"{directory}/{buffer.rank}").touch()
        if buffer.rank == buffer.num_ranks - 1:
            wait_for(f"{directory}/thawed")
        try:
            good_round(buffer)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def wait_with_lanes(group: Any, seconds: float) -> tuple[float, float]:
    """Return CPU and wall time of a round in which rank 1 is late."""
    with open_buffer(group, num_threads=4) as buffer:
        good_round(buffer)
        cpu, wall = time.process_time(), time.monotonic()
        if buffer.rank == 1:
            time.sleep(seconds)
        good_round(buffer)
        return time.process_time() - cpu, time.monotonic() - wall


def flushed(group: Any, num_threads: int) -> list[bytes]:
    """Return outputs of a round with denormal values. They are flushed from the buffer's second round on."""
    spec = make_spec(2, dtype=torch.float32)
    with Buffer(group, num_threads=num_threads, **buffer_kwargs(spec)) as buffer:
        tokens = spec.num_max_tokens_per_rank
        x = torch.full((tokens, spec.hidden), 1e-40, requires_grad=True)
        grad_out = x.detach().clone()
        idx = torch.arange(tokens * spec.num_topk).reshape(tokens, -1) % spec.num_experts
        good_round(buffer)
        torch.set_flush_denormal(True)
        try:
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(tokens, spec.num_topk))
            out = buffer.combine(recv_x, recv_weights, handle)
            out.backward(grad_out)
            assert x.grad is not None
            return [out.detach().numpy().tobytes(), x.grad.numpy().tobytes()]
        finally:
            torch.set_flush_denormal(False)


def waits_for_ever(group: Any, timeout_s: float) -> str:
    """Rank 1 is late, but within the timeout."""
    with open_buffer(group, timeout_s=timeout_s, init_timeout_s=math.inf) as buffer:
        good_round(buffer)
        if buffer.rank == 1:
            time.sleep(0.2)
        try:
            good_round(buffer)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
