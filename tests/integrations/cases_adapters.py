"""Helpers shared by the torchtitan and Megatron cases: inputs, NaN in rows without tokens, and differences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 16, 24, 6, 2


def rank_and_size(group: Any) -> tuple[int, int]:
    if isinstance(group.rank, int):
        return group.rank, group.size
    return group.rank(), group.size()


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Return numbers that are equal on every rank, without the global generator, which ranks in threads share."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def inputs_of(rank: int, num_tokens: int) -> Tensor:
    return numbers(100 + rank, num_tokens, HIDDEN)


def poison(rows: Tensor, counts: Tensor) -> None:
    """Write NaN into all rows past the counts, and later into the same rows of their gradient."""
    real = int(counts.sum())
    rows.data[real:] = float("nan")

    def poisoned(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[real:] = float("nan")
        return grad

    if rows.requires_grad:
        rows.register_hook(poisoned)


def weighted_sum(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, HIDDEN)).sum()


def differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return differences relative to the largest expected value; infinite for NaN or another shape."""
    assert got.keys() == expected.keys()
    return {name: _difference(got[name], expected[name]) for name in got}


def _difference(a: Tensor | None, b: Tensor) -> float:
    if a is None or a.shape != b.shape or not a.isfinite().all():
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) if b.numel() else 0.0
