"""One verified step of a rank: dispatch, combine and, in modes with gradients, their backwards, with exact sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_rt.chaos.board import Board
from moe_rt.comm.buffer import Buffer
from moe_rt.config.options import HeapKind, Route
from moe_rt.heap.groups import Group
from moe_rt.testing.rounds import WrongOutput

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
    )


class Steps:
    """Steps on integers, whose sums are exact in any order; the data differ in every step.

    The start of each op is noted on the board, except that both backward ops are one call. Every third output is kept
    until the next step is done and checked again: its memory must not have been given to another tensor.
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
        recv_x, recv_weights, handle = buffer.dispatch(x, topk_idx, topk_weights)
        self._begin()
        out = buffer.combine(recv_x.neg(), recv_weights, handle)  # only neg() involves autograd
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
