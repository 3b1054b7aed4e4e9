"""A small case, and functions that make an output of it wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_rt.lab.bench.cases import Case

ROTATIONS = 2
Spoil = Callable[[Tensor], Tensor]


def case_of(ranks: int, dtype: str, **changes: Any) -> Case:
    """Return a case with seven experts, of which some ranks have more than others."""
    sizes = dict(tokens=9, hidden=12, topk=3, experts=7, intermediate=8)
    return Case(**{**sizes, "ranks": ranks, "dtype": dtype, **changes})


def nan(out: Tensor) -> Tensor:
    out = out.clone()
    out[-1, -1] = torch.nan
    return out


def one_token(out: Tensor) -> Tensor:
    """Give the last token the first one's output."""
    return torch.cat((out[:-1], out[:1]))


def one_zero(out: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(out[:1]), out[1:]))


def one_tenth_more(out: Tensor) -> Tensor:
    return torch.cat((out[:1] * 1.1, out[1:]))


def one_bit(out: Tensor) -> Tensor:
    """Flip the last bit of one element."""
    out = out.clone()
    out.view(torch.uint8)[-1, 0] ^= 1
    return out


def short(out: Tensor) -> Tensor:
    return out[1:]
