"""One rank of a session: it makes a buffer, runs verified steps, and reports what ended them and when."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from moe_rt import faults
from moe_rt.chaos.board import Board
from moe_rt.chaos.misdeeds import misbehave
from moe_rt.chaos.steps import Size, Steps, make_buffer
from moe_rt.comm.buffer import Buffer
from moe_rt.errors import MoeRtError
from moe_rt.heap.rendezvous import ThreadGroup
from moe_rt.heap.ucx import await_peers
from moe_rt.testing.channel import Channel
from moe_rt.testing.held import held, left_of
from moe_rt.testing.limits import MIB, limited
from moe_rt.testing.rounds import WrongOutput

PATIENCE_S = 60.0
_POPULATED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE


def serve(channel: Channel, board: Board, place: int, far: bool) -> None:
    """Run sessions by orders from the channel, and send a report of each. `place` is the rank's index on the board.
    `far` is True if some ranks are on other hosts.

    Orders: host and port (of the store), session (its name there), rank, size (of the process group), timeout_s and
    init_timeout_s; optional: fault (for MOE_RT_FAULT), sizes (fields of Size), modes (of the steps, in order),
    ballast_mib (memory to hold), limit ([kind, room], see `limited`), instead ([rank, step, act], see `misbehave`). The
    report: raised (the error's class, "nothing" or "wrong data"), typed (True for an error class of moe_rt), message,
    peer, at (when it was raised, monotonic), made (True if the buffer was made), steps done, then (error of the next
    step), segments, descriptors and threads that leaked.
    """
    torch.set_num_threads(1)
    os.environ[faults.VARIABLE] = ""  # faults apply to sessions only
    # SIGINT is only for the process that injects faults, and for a rank that is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _warm_up(far)
    with suppress(EOFError):
        for orders in iter(channel.receive, None):  # never None: the end of the channel raises
            channel.send(json.dumps(_life(json.loads(orders), board, place)).encode())


def _life(order: dict[str, Any], board: Board, place: int) -> dict[str, Any]:
    """Run one session, and add to its report the resources that it leaked."""
    before = held()
    ballast = mmap.mmap(-1, max(1, order.get("ballast_mib", 0) * MIB), flags=_POPULATED)
    _join(order)
    report = _session(order, board, place)
    await_peers()
    dist.destroy_process_group()
    ballast.close()
    return report | left_of(before)


def _warm_up(far: bool) -> None:
    """Run a step before the sessions: libraries initialise in it, and a short timeout_s must not be spent on that.

    Resources that they keep permanently then do not count as leaks.
    """
    with make_buffer(ThreadGroup.make(1)[0], 1, Size(), PATIENCE_S, PATIENCE_S) as buffer:
        Steps(buffer, Board(1), 0).run(0)
    if far:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        make_buffer(dist.group.WORLD, 1, Size(heap="ucx"), PATIENCE_S, PATIENCE_S).close()
        await_peers()
        dist.destroy_process_group()


def _join(order: dict[str, Any]) -> None:
    rank, size = order["rank"], order["size"]
    store = PrefixStore(order["session"], TCPStore(order["host"], order["port"]))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    # A rank that fails early must not cut off one that is still connecting to it.
    store.set(f"connected/{rank}", "1")
    store.wait([f"connected/{r}" for r in range(size)])


def _session(order: dict[str, Any], board: Board, place: int) -> dict[str, Any]:
    fault = os.environ[faults.VARIABLE] = order.get("fault", "")
    rank, size = order["rank"], Size(**order.get("sizes", {}))
    leaves_early = "in_destroy" in fault and f"rank={rank}," in fault
    buffer: Buffer | None = None
    raised: BaseException | None = None
    report: dict[str, Any] = {"raised": "nothing", "steps": 0, "then": "nothing"}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        board.begin(place)
        board.step[place] = 0
        with limited(*order["limit"]) if "limit" in order else nullcontext():
            buffer = make_buffer(dist.group.WORLD, order["size"], size, order["timeout_s"], order["init_timeout_s"])
        steps = Steps(buffer, board, place, order.get("modes", ["train"]))
        who, when, act = order.get("instead", [-1, -1, ""])
        while report["steps"] < board.steps[place] - leaves_early:
            if report["steps"] == when:
                misbehave(buffer, act, rank == who, when)
            steps.run(report["steps"])
            report["steps"] += 1
        board.begin(place)
        buffer.close()
    except (Exception, KeyboardInterrupt) as error:
        report |= _raised(error)
        if buffer is not None:  # otherwise the error would keep a partly made buffer alive
            raised = error
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if buffer is not None and report["raised"] != "nothing":
        if not report["typed"]:
            buffer.abort(raised)  # the same as leaving its `with` block by an exception
        try:
            Steps(buffer, Board(1), 0).run(0)
        except (MoeRtError, WrongOutput) as error:
            report["then"] = type(error).__name__
        buffer.abort()
    report["made"] = buffer is not None
    return report


def _raised(error: BaseException) -> dict[str, Any]:
    return {
        "raised": "wrong data" if isinstance(error, WrongOutput) else type(error).__name__,
        "typed": isinstance(error, MoeRtError),
        "message": str(error),
        "peer": getattr(error, "peer", -1),
        "at": time.monotonic(),
    }
