"""Misuse of the API in a session: a rank raises, leaves, calls another op, or passes bad input or too many rows."""

from __future__ import annotations

import torch

from moe_rt.chaos.steps import inputs
from moe_rt.comm.buffer import Buffer
from moe_rt.errors import CapacityOverflow, InvalidRouting
from moe_rt.testing.rounds import WrongOutput

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
