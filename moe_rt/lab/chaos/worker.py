"""One rank of a session: it makes a buffer, runs verified steps, and reports what ended them and when."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from moe_rt import faults
from moe_rt.buffer.buffer import Buffer
from moe_rt.config.options import HeapKind, Route
from moe_rt.errors import CapacityOverflow, InvalidRouting, MoeRtError
from moe_rt.group.groups import Group
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.resources import MIB, held, left_of, limited
from moe_rt.lab.testing.rounds import WrongOutput
from moe_rt.memory.ucx import await_peers


class Board:
    """One page of memory shared with every process forked later.

    Attributes:
        began: time when each rank last began an operation, in monotonic seconds; it survives a rank killed in it.
        step: number of steps that each rank has begun; -1 before it joins this session.
        steps: number of steps of each rank's session. Stop a working rank before changing it.
    """

    def __init__(self, size: int) -> None:
        page = memoryview(mmap.mmap(-1, 8 * 3 * size))
        self.began = page[: 8 * size].cast("d")
        self.step = page[8 * size : 16 * size].cast("q")
        self.steps = page[16 * size :].cast("q")

    def begin(self, rank: int) -> None:
        """Record that the rank begins an operation now."""
        self.began[rank] = time.monotonic()


TOPK, EXPERTS_PER_RANK = 2, 2
OPS_OF_A_STEP = 4  # dispatch, combine, combine_backward, dispatch_backward
# Modes of a step. Modes without gradients run only dispatch and combine.
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "train": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@dataclass(frozen=True)
class Size:
    """Options of a buffer: its maximum tokens per rank, elements per row, and others."""

    tokens: int = 8
    hidden: int = 32
    num_threads: int = 1
    route: Route | Literal["auto"] = "auto"
    heap: HeapKind | Literal["auto"] = "auto"
    capacity_factor: float | None = None
    depth: int = 1


def make_buffer(group: Group, num_ranks: int, size: Size, timeout_s: float, init_timeout_s: float) -> Buffer:
    """Make a buffer for `Steps`."""
    return Buffer(
        group,
        num_max_tokens_per_rank=size.tokens,
        hidden=size.hidden,
        num_topk=TOPK,
        num_experts=EXPERTS_PER_RANK * num_ranks,
        dtype=torch.float32,
        timeout_s=timeout_s,
        init_timeout_s=init_timeout_s,
        num_threads=size.num_threads,
        route=size.route,
        heap=size.heap,
        capacity_factor=size.capacity_factor,
        depth=size.depth,
    )


class Steps:
    """Steps on integers, whose sums are exact in any order; the data differ in every step.

    The start of each op is noted on the board, except that both backward ops are one call. Every third output is kept
    until the next step is done and checked again: its memory must not have been given to another tensor. With a
    depth, a second dispatch is under way during the first ops.
    """

    def __init__(self, buffer: Buffer, board: Board, place: int, modes: Sequence[str] = ("train",)) -> None:
        self._buffer, self._board, self._place, self._modes = buffer, board, place, modes
        self._kept: tuple[Tensor, Tensor] | None = None

    def run(self, i: int) -> None:
        """Run step number i.

        Raises:
            WrongOutput: a result is wrong; names it.
        """
        self._board.step[self._place] = i + 1
        with MODES[self._modes[i % len(self._modes)]]():
            out, expected = self._step(i)
        if self._kept is not None:
            _expect("out of the step before", *self._kept)
        self._kept = (out, expected) if (i + self._buffer.rank) % 3 == 0 else None

    def _step(self, i: int) -> tuple[Tensor, Tensor]:
        buffer = self._buffer
        x, topk_idx = inputs(buffer, i)
        topk_weights = torch.ones(topk_idx.shape).requires_grad_()
        self._begin()
        other = None
        if buffer.spec.depth > 1:
            other = buffer.dispatch(x.detach(), topk_idx, topk_weights.detach(), tag=i, wait=False)
        recv_x, recv_weights, handle = self._exchange(buffer.dispatch, i, x, topk_idx, topk_weights)
        self._begin()
        out = self._exchange(buffer.combine, i // 2, recv_x.neg(), recv_weights, handle)  # only neg() involves autograd
        if other is not None:
            rows = int(handle.offs[-1])
            _expect("recv_x of an op under way", other.wait()[0][:rows], recv_x.detach()[:rows])
        visits = (topk_idx >= 0).sum(1, keepdim=True)
        expected = -x.detach() * visits
        _expect("out", out, expected)
        if torch.is_grad_enabled():
            grad_out = float(i % 5 + 1)
            # A gradient passed to backward() would make every new process import sympy.
            loss = (out.neg() * grad_out).sum()
            self._begin()
            loss.backward()
            _expect("grad_x", x.grad, (grad_out * visits).expand_as(x))
            of_an_entry = (grad_out * x.detach()).sum(1, keepdim=True)
            _expect("grad_topk_weights", topk_weights.grad, of_an_entry * (topk_idx >= 0))
        return out.detach(), expected

    def _exchange(self, op: Callable[..., Any], i: int, *given: Any) -> Any:
        """Run an op whole, or in halves; ranks differ."""
        if (i + self._buffer.rank) % 2:
            return op(*given)
        pending = op(*given, wait=False)
        time.sleep(0)  # lets another rank on this core go on
        return pending.wait()

    def _begin(self) -> None:
        self._board.begin(self._place)


def inputs(buffer: Buffer, i: int) -> tuple[Tensor, Tensor]:
    """x [T, H] and topk_idx [T, K]. T, the choices and the dropped entries depend on the rank and the step."""
    rank, most, num_experts = buffer.rank, buffer.spec.num_max_tokens_per_rank, buffer.spec.num_experts
    num_tokens = (most - 5 * rank - 3 * (i // 3)) % (most + 1)  # outputs keep one shape for several steps
    token = torch.arange(num_tokens)[:, None]
    x = ((token + 7 * i + 3 * rank) % 11 + torch.arange(buffer.spec.hidden) % 3).float().requires_grad_()
    first = (token + i + rank) % num_experts
    second = torch.where(token % 4 == 3, -1, (first + 1 + token) % num_experts)
    return x, torch.cat([first, torch.where(second == first, -1, second)], 1)


def _expect(name: str, got: Tensor | None, expected: Tensor) -> None:
    if got is None or not torch.equal(got, expected):
        raise WrongOutput(name)


# Value for `Size.capacity_factor`: a step of the usual `Size` fits, but all rows to one rank do not.
TIGHT = 1.5


def misbehave(buffer: Buffer, act: str, by_this_rank: bool, step: int) -> None:
    """Misbehave before a step: "raise", "close", "abort" or "order" on one rank; "input" or "overflow", which all ranks
    refuse.

    Raises:
        WrongOutput: the misuse was not refused, or with another error.
    """
    if act in ("input", "overflow"):
        return _be_refused(buffer, act, by_this_rank, step)
    if not by_this_rank:
        return
    if act == "raise":
        raise ValueError("a mistake on purpose")
    if act == "close":
        buffer.close()
    elif act == "abort":
        buffer.abort(ValueError("a mistake on purpose"))
    else:  # the others call a combine
        x, topk_idx = inputs(buffer, step)
        for _ in range(2):
            buffer.dispatch(x, topk_idx, torch.ones(topk_idx.shape))


def _be_refused(buffer: Buffer, act: str, by_this_rank: bool, step: int) -> None:
    x, topk_idx = inputs(buffer, step)
    if act == "overflow":  # the maximum number of rows, all to one rank
        x = torch.ones(buffer.spec.num_max_tokens_per_rank, buffer.spec.hidden)
        topk_idx = torch.arange(topk_idx.shape[1]).expand(len(x), -1)
    elif by_this_rank:
        x = torch.ones(1, buffer.spec.hidden)
        topk_idx = torch.full((1, topk_idx.shape[1]), buffer.spec.num_experts)
    raised: type[Exception] | None = None
    try:
        buffer.dispatch(x, topk_idx, torch.ones(topk_idx.shape))
    except (CapacityOverflow, InvalidRouting) as error:
        raised = type(error)
    if raised is not (CapacityOverflow if act == "overflow" else InvalidRouting):
        raise WrongOutput(f"{act}: {raised}")


PATIENCE_S = 60.0
_POPULATED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE


def serve(channel: Channel, board: Board, place: int, remote: bool) -> None:
    """Run sessions by orders from the channel, and send a report of each. `place` is the rank's index on the board.
    `remote` is True if some ranks are on other hosts.

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
    _warm_up(remote)
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


def _warm_up(remote: bool) -> None:
    """Run a step before the sessions: libraries initialise in it, and a short timeout_s must not be spent on that.

    Resources that they keep permanently then do not count as leaks.
    """
    with make_buffer(ThreadGroup.make(1)[0], 1, Size(), PATIENCE_S, PATIENCE_S) as buffer:
        Steps(buffer, Board(1), 0).run(0)
    if remote:
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
