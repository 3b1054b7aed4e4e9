"""Texts of errors, and operands that are wrong in one way, for tests of deep_ep's refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.errors import MoeRtError

bf16, f32 = torch.bfloat16, torch.float32


def zeros(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def across(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    """Return a tensor whose columns are contiguous."""
    return torch.zeros(tuple(reversed(shape)), dtype=dtype).T


def said(call: Callable[[], Any]) -> str:
    """Return the text of the call's error without the section of the documentation, or "" if it raises none."""
    try:
        call()
    except MoeRtError as error:
        return str(error).rpartition(" (moe-rt docs")[0]
    return ""


Cases = list[tuple[dict[str, Any], str]]


def check(rank: int, op: Callable[..., Any], right: dict[str, Any], cases: Cases) -> None:
    """Call op with the right arguments, changed as in each case, and compare each error with the text of the case."""
    got = [said(lambda changed=changed: op(**{**right, **changed})) for changed, _ in [*cases, ({}, "")]]
    expected = [f"rank {rank}: {text}" if text else "" for _, text in [*cases, ({}, "")]]
    assert got == expected, next(pair for pair in zip(got, expected, strict=True) if pair[0] != pair[1])


def on_two_ranks(make: Callable[[ThreadGroup], Any], work: Callable[[Any, int], Any]) -> list[Any]:
    """Run work(make(group), rank) on two threads."""
    return ThreadGroup.run(lambda group: work(make(group), group.rank), 2, timeout_s=CASE_TIMEOUT_S)
