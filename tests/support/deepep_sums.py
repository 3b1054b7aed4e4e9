"""Tokens, and sums of all experts over them, for programs in which a server's own classes call deep_ep on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

HIDDEN, EXPERTS, TOPK, TOKENS = 2048, 8, 2, (11, 16)


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [T, H], weights [T, K] and ids [T, K] of a rank."""
    draw = torch.Generator().manual_seed(rank)
    weights, ids = torch.rand(TOKENS[rank], EXPERTS, generator=draw).topk(TOPK)
    return torch.randn(TOKENS[rank], HIDDEN, generator=draw).bfloat16(), weights, ids


def check(rank: int, out: torch.Tensor) -> None:
    """Compare with the sum over a token's experts, of which e multiplies by 1 + e."""
    x, weights, ids = inputs(rank)
    right = x.float() * (weights * (1 + ids)).sum(1, keepdim=True)
    assert torch.allclose(out.float(), right, rtol=2**-5, atol=2**-3)


def run_on_cpu(program: Path) -> None:
    """Run a program on two CPU ranks, each of which prints that it passed."""
    done = subprocess.run(
        [sys.executable, "-m", "moe_rt", "on-cpu", "--ranks", "2", "--", sys.executable, str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("passed") == 2
