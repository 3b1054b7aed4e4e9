"""Rank functions for faults between the halves of an op; each returns what its rank saw."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from faults.cases_faults import good_round, open_buffer
from support.routing import make_spec

from moe_rt import Buffer
from moe_rt.buffer.pending import Pending
from moe_rt.lab.testing.resources import held, left_of

FAULTY_RANK = 1


def begin(buffer: Buffer) -> Pending[Any]:
    x, idx = torch.ones(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
    return buffer.dispatch(x, idx, torch.ones(4, buffer.spec.num_topk), wait=False)


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, KeyboardInterrupt, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def between(group: Any, fault: str, depth: int = 1, **options: Any) -> list[str]:
    """Rank FAULTY_RANK fails after it has begun `depth` ops. Return the outcomes of the waits, and of a round after."""
    buffer = open_buffer(group, depth=depth, **options)
    good_round(buffer)
    pending, faulty = begin(buffer), group.rank() == FAULTY_RANK
    others = [begin(buffer) for _ in range(buffer.spec.depth - 1)]
    group.barrier().wait()
    if faulty and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if faulty and fault == "raises":
        with buffer:
            1 / 0  # noqa: B018
    if faulty and fault == "closes":
        buffer.close()
    if faulty and fault == "aborts":
        buffer.abort(ValueError("a mistake on purpose"))
    waited = [outcome(each.wait) for each in (pending, *others)]
    return [*waited, outcome(lambda: good_round(buffer))]


def closed_after(group: Any, who: int, depth: int, **options: Any) -> list[str]:
    """Rank `who` closes after 1, 2 ... `depth` dispatches, of a buffer each. Return the outcomes of the next ones."""
    found = []
    for count in range(1, depth + 1):
        buffer, gate = open_buffer(group, depth=depth, **options), open_buffer(group)
        for _ in range(count):
            begin(buffer).wait()
        with gate:  # all ranks have ended these ops once all take part in another
            begin(gate).wait()
        if buffer.rank == who:
            buffer.close()
        found.append(outcome(partial(begin_and_wait, buffer)))
        buffer.close()
    return found


def begin_and_wait(buffer: Buffer) -> None:
    begin(buffer).wait()


def begun_before_it_closed(group: Any, depth: int, rows: int, **options: Any) -> list[str]:
    """Rank FAULTY_RANK closes with `depth` ops under way, before the others begin these. Return their outcomes."""
    sizes = dict(num_max_tokens_per_rank=rows, hidden=1024, num_topk=1, num_experts=group.size())
    buffer = open_buffer(group, make_spec(group.size(), depth=depth, **sizes), **options)
    x, weights = torch.full((rows, 1024), 1.0 + buffer.rank), torch.ones(rows, 1)
    idx = torch.arange(rows).unsqueeze(1) % buffer.num_ranks

    def right(recv_x: torch.Tensor, _: torch.Tensor, handle: Any) -> None:
        ranks = range(buffer.num_ranks)
        expected = torch.cat([torch.full(((idx == buffer.rank).sum(), 1024), 1.0 + rank) for rank in ranks])
        if not torch.equal(recv_x[: int(handle.offs[-1])], expected):
            raise RuntimeError("other rows")

    if buffer.rank == FAULTY_RANK:
        for _ in range(depth):
            buffer.dispatch(x, idx, weights, wait=False)
        buffer.close()
        del buffer, right  # its network serves peers without them
        gc.collect()
        group.barrier().wait()
        group.barrier().wait()
        return []
    group.barrier().wait()
    ops = [buffer.dispatch(x, idx, weights, wait=False) for _ in range(depth)]
    found = [outcome(lambda op=op: right(*op.wait())) for op in ops]  # type: ignore[misc]
    group.barrier().wait()
    buffer.close()
    return found


def fork_between(group: Any, depth: int) -> tuple[str, str]:
    """A forked child waits for its parent's ops. Return the outcomes of the child and of the parent, a line each."""
    buffer = open_buffer(group, depth=depth)
    all_begun = [begin(buffer) for _ in range(depth)]
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ours, "\n".join(outcome(pending.wait) for pending in all_begun).encode())
        os._exit(0)
    os.close(ours)
    with os.fdopen(theirs) as pipe:
        of_child = pipe.read()
    os.waitpid(child, 0)
    of_parent = "\n".join(outcome(pending.wait) for pending in all_begun)
    good_round(buffer)
    buffer.close()
    return of_child, of_parent


def interrupt_second_half(buffer: Buffer) -> None:
    """Interrupt (Ctrl-C) this rank once it has been in the second half of an op for a while."""
    inside, second = threading.Event(), buffer._engine._run_second

    def run_second(begun: Any) -> None:
        inside.set()
        second(begun)

    def handler(*_: object) -> None:
        if inside.is_set():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    buffer._engine._run_second = run_second  # type: ignore[method-assign]
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.1)


def interrupted_wait(group: Any, depth: int) -> list[str]:
    """Rank 0 is interrupted while it waits for rank 1, which begins its op only after that."""
    buffer = open_buffer(group, depth=depth)
    good_round(buffer)
    if group.rank() == 0:
        *others, last = [begin(buffer) for _ in range(depth)]
        interrupt_second_half(buffer)
        waits = last.wait, *(pending.wait for pending in others)
        return [*(outcome(wait) for wait in waits), outcome(lambda: good_round(buffer))]
    while outcome(buffer.check) == "ok":
        pass
    return [outcome(lambda: begin(buffer)), outcome(lambda: good_round(buffer))]


def two_waits(group: Any) -> list[str]:
    """Two threads of rank 0 wait for one op, for which rank 1 arrives when one of them has left."""
    buffer, seen = open_buffer(group), list[str]()
    good_round(buffer)
    if group.rank() == 0:
        pending = begin(buffer)
        threads = [threading.Thread(target=lambda: seen.append(outcome(pending.wait))) for _ in range(2)]
        for t in threads:
            t.start()
        while not seen:
            pass
        group.barrier().wait()
        for t in threads:
            t.join()
    else:
        group.barrier().wait()
        begin(buffer).wait()
    good_round(buffer)
    buffer.close()
    return sorted(seen)


def lost_buffers(group: Any, count: int, depth: int = 1, **options: Any) -> int:
    """Make buffers whose ops are never waited for. Return how much of them is left in this process."""
    kept = None
    for i in range(count):
        buffer = open_buffer(group, depth=depth, **options)
        for _ in range(buffer.spec.depth):
            begin(buffer)
        buffer.close()
        del buffer
        if i == 1:
            kept = held()
    return 0 if kept is None else max(0, *left_of(kept).values())
