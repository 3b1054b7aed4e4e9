"""Rank functions for tests of dead, silent, leaving and raising peers; each returns what its rank saw."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from typing import Any

import torch
from faults.cases_faults import good_round, open_buffer
from support.ranks import meet
from support.routing import make_spec

from moe_rt import Buffer
from moe_rt.errors import MoeRtError
from moe_rt.lab.testing.resources import held, left_of

kept: list[Buffer] = []


def first_round(group: Any, buffer: Buffer) -> None:
    """Complete a round on every rank, so that a later failure cannot affect anyone's first round."""
    good_round(buffer)
    meet(group)


def peer_closes_first(group: Any, faulty_rank: int) -> str:
    buffer = open_buffer(group)
    first_round(group, buffer)
    if buffer.rank == faulty_rank:
        buffer.close()
        return "closed"
    try:
        good_round(buffer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def raise_between_ops(group: Any, faulty_rank: int) -> str:
    """The faulty rank's code raises between dispatch and combine."""
    try:
        with open_buffer(group) as buffer:
            first_round(group, buffer)
            if buffer.rank == faulty_rank:
                raise KeyError("the user's own mistake")
            good_round(buffer)
    except (RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def stay_away(group: Any, faulty_rank: int, timeout_s: float) -> tuple[str, float]:
    """The faulty rank does not reach the second round within the timeout."""
    buffer = open_buffer(group, timeout_s=timeout_s)
    good_round(buffer)
    start = time.monotonic()
    try:
        while buffer.rank == faulty_rank:
            buffer.check()
            time.sleep(0.01)
    except MoeRtError:
        pass  # the group has ended, of which the next op reminds
    try:
        good_round(buffer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def die_at(group: Any, faulty_rank: int, at: str) -> str:
    """The faulty rank is killed; survivors return what they saw."""
    buffer = open_buffer(group)
    first_round(group, buffer)
    x, idx = torch.randn(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
    weights = torch.ones(4, buffer.spec.num_topk, requires_grad=True)
    die = buffer.rank == faulty_rank
    try:
        if die and at == "dispatch":
            os.kill(os.getpid(), signal.SIGKILL)
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        if die and at == "combine":
            os.kill(os.getpid(), signal.SIGKILL)
        out = buffer.combine(recv_x, recv_weights, handle)
        if die and at == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        out.sum().backward()
    except RuntimeError as error:
        seen = f"{type(error).__name__}: {error}"
        try:
            good_round(buffer)
        except RuntimeError as again:
            return seen + " | then " + type(again).__name__
        return seen + " | then no error"
    return "no error"


def open_close_many(group: Any, times: int) -> tuple[dict[str, int], int]:
    """Return what this process still has open after making buffers, closed or left to the garbage collector, and the
    number of this rank's mapped segments that are still in memory."""
    mapped: list[weakref.ref[Any]] = []
    with open_buffer(group) as buffer:  # a first buffer allocates what stays; synchronises all ranks
        good_round(buffer)
        before = held()
    for i in range(times):
        buffer = open_buffer(group)
        good_round(buffer)
        mapped += [weakref.ref(mapping) for mapping in buffer._engine._segments.mappings]
        if i % 2:
            buffer.close()
        del buffer
    with open_buffer(group) as buffer:  # all ranks have released theirs here
        good_round(buffer)
        return left_of(before), sum(mapping() is not None for mapping in mapped)


def keep_open(group: Any) -> list[int]:
    """Return the inodes of all segments of a buffer that is never closed."""
    kept.append(open_buffer(group))
    good_round(kept[0])
    return [inode for _, inode in kept[0]._engine._segments.members]


def use_in_child(group: Any, num_threads: int) -> str:
    """A forked child must not act as the rank; the parent continues after the child has exited."""
    with open_buffer(group, num_threads=num_threads) as buffer:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                good_round(buffer)
                text = "no error"
            except RuntimeError as error:
                text = f"{type(error).__name__}: {error}"
            buffer.close()
            os.write(write_end, text.encode())
            os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        text = os.read(read_end, 4096).decode()
        os.close(read_end)
        good_round(buffer)
        return text


def let_go_in_child(group: Any, num_threads: int) -> int:
    """A forked child's copy of the buffer is garbage collected there; return the child's exit status."""
    buffer = open_buffer(group, num_threads=num_threads)
    good_round(buffer)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it if it waits for threads it does not have
        del buffer
        gc.collect()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    good_round(buffer)
    buffer.close()
    return status


def too_large(group: Any) -> str:
    """Return the error for a segment that no machine has memory for."""
    spec = make_spec(group.size(), num_max_tokens_per_rank=2**20, hidden=2**20, num_topk=1, num_experts=3)
    try:
        open_buffer(group, spec)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
