"""What a rank of its own accord does in a session that it should not: raises, leaves, calls another op, or gives nonsense."""

from __future__ import annotations

import torch

from moe_rt.chaos.steps import inputs
from moe_rt.comm.buffer import Buffer
from moe_rt.errors import InvalidRouting
from moe_rt.testing.rounds import WrongOutput

MISDEEDS = ("raise", "close", "abort", "order", "input")


def misbehave(buffer: Buffer, act: str, by_this_rank: bool, step: int) -> None:
    """One of MISDEEDS before a step. Only for "input" have the others something to do: all call the op, which is refused.

    Raises:
        WrongOutput: that input was not refused.
    """
    if act == "input":
        return _be_refused(buffer, by_this_rank, step)
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


def _be_refused(buffer: Buffer, by_this_rank: bool, step: int) -> None:
    x, topk_idx = inputs(buffer, step)
    if by_this_rank:
        x = torch.ones(1, buffer.spec.hidden)
        topk_idx = torch.full((1, topk_idx.shape[1]), buffer.spec.num_experts)
    try:
        buffer.dispatch(x, topk_idx, torch.ones(topk_idx.shape))
    except InvalidRouting:
        return
    raise WrongOutput("input that had to be refused")
