"""Sizes of a timed dispatch and combine pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Load:
    """One set of sizes. With two or more ranks, recv_x is not sized for the worst case, which would take most of the
    memory.

    Attributes:
        raises: True if too many rows are an error rather than dropped, so that every rank reads every count.
        num_sms: maximum number of blocks of a launch; None for all that fit.
        rings: True if rows go through shared memory when blocks are few (docs/cuda.md).
    """

    ranks: int
    tokens: int = 4096
    hidden: int = 7168
    topk: int = 8
    experts: int = 64
    raises: bool = False
    num_sms: int | None = None
    rings: bool = True

    def buffer_kwargs(self) -> dict[str, Any]:
        return {
            "num_max_tokens_per_rank": self.tokens,
            "hidden": self.hidden,
            "num_topk": self.topk,
            "num_experts": self.experts,
            "dtype": torch.bfloat16,
            "capacity_factor": None if self.ranks == 1 else 1.5,
            "overflow": "raise" if self.ranks == 1 or self.raises else "drop",
            "num_sms": self.num_sms,
            "timeout_s": TIMEOUT_S,
        }

    def capacity_bytes(self) -> int:
        """Bytes of recv_x on one rank."""
        balanced = self.tokens * self.topk * self.hidden * 2
        return balanced if self.ranks == 1 else balanced * 3 // 2
