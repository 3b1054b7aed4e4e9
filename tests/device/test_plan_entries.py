"""A GPU's host does not read a handle's entries; kernels skip entries that lead nowhere."""

from __future__ import annotations

from typing import Any

import torch
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.routing import buffer_kwargs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer

HEAD_WORDS, PULLED_WORDS = 12, 4  # sizes of RecvPlan::Head and Pulled, in words
FIRST = 2  # index in Pulled of its first copy
TOKENS, TOPK, WRONG = 12, 3, 1e30


def combined(buffer: Buffer, rewrite: Any = None) -> Tensor:
    """Combine rows that are WRONG wherever no row was received."""
    inputs = make_inputs(buffer.spec, [TOKENS], 1, "topk")
    recv_x, recv_weights, handle = buffer.dispatch(inputs.xs[0], inputs.topk_idx[0], inputs.topk_weights[0])
    y = torch.full_like(recv_x, WRONG)
    num_rows = int(handle.offs[-1])
    y[:num_rows] = recv_x[:num_rows]
    if rewrite:
        rewrite(handle.recv_plan, num_rows)
    return buffer.combine(y, recv_weights, handle)


def an_entry(group: Any) -> None:
    """A token without copies in the plan keeps its home row, from the equal round before."""

    def rewrite(plan: Tensor, num_rows: int) -> None:
        plan[HEAD_WORDS + FIRST] = TOKENS * TOPK

    with _opened(group) as buffer:
        first = combined(buffer)
        assert torch.equal(combined(buffer, rewrite), first)


def a_row(group: Any) -> None:
    """A copy whose row was not received adds nothing."""
    rows_at = HEAD_WORDS + PULLED_WORDS * TOKENS

    def rewrite(plan: Tensor, num_rows: int) -> None:
        plan[rows_at] = num_rows

    with _opened(group) as buffer:
        first, second = combined(buffer), combined(buffer, rewrite)
        assert torch.equal(first[1:], second[1:])
        assert second[0].abs().max() < WRONG / 2
        assert not torch.equal(first[0], second[0])


def _opened(group: Any) -> Buffer:
    spec = make_spec(1, num_max_tokens_per_rank=TOKENS, num_topk=TOPK, overflow="drop", capacity_factor=0.9)
    return Buffer(group, timeout_s=60.0, **buffer_kwargs(spec))


def test_an_entry_that_leads_nowhere() -> None:
    ThreadRanks(1, EmulatedGpu()).run(an_entry)


def test_a_row_that_was_not_received() -> None:
    ThreadRanks(1, EmulatedGpu()).run(a_row)
