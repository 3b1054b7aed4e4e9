"""DeepEP's numeric helpers, as its tests use them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moe_rt.compat.deep_ep.fp8 import BLOCK, LARGEST, SMALLEST_AMAX


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Return 1 minus the similarity of x + 1 and y + 1: 0 if they are equal."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def safe_div(a: float, b: float) -> float:
    """Return a / b, and 0 for 0 / 0."""
    return 0.0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Return x, rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn [T, H] and float32 [T, ceil(H / 128)], whose product is about x [T, H]."""
    num_tokens, hidden = x.shape
    padded = torch.nn.functional.pad(x, (0, -hidden % BLOCK))
    blocks = padded.view(num_tokens, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().float().amax(2).clamp(min=SMALLEST_AMAX)
    codes = (blocks * (LARGEST / amax).unsqueeze(2)).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:, :hidden].contiguous(), amax / LARGEST


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Return codes [T, H] times their scales, float32 or the exponents of UE8M0, as bfloat16."""
    if x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    num_tokens, hidden = x_fp8.shape
    if x_scales.dtype is torch.int32:
        exponents = x_scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        x_scales = (exponents.int() << 23).view(torch.float32)
    padded = torch.nn.functional.pad(x_fp8.float(), (0, -hidden % BLOCK))
    rows = padded.view(num_tokens, -1, BLOCK) * x_scales.reshape(num_tokens, -1, 1)
    return rows.view(padded.shape).to(torch.bfloat16)[:, :hidden].contiguous()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Replace each row of x by its different non-negative values, the largest first, then -1."""
    ordered = x.clamp(min=-1).sort(1).values
    ordered[:, 1:] = ordered[:, 1:].masked_fill(ordered[:, 1:] == ordered[:, :-1], -1)
    x.copy_(ordered.sort(1, descending=True).values)


def hash_tensor(t: Tensor) -> int:
    """Return the sum of a tensor's bits, read as int32."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """Return the exclusive or of the hashes of tensors, in tuples and lists too."""
    value = 0
    for t in tensors:
        if isinstance(t, Tensor):
            value ^= hash_tensor(t)
        elif isinstance(t, (tuple, list)):
            value ^= hash_tensors(*t)
    return value


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Return scores [T, E] with 0 for experts of groups that group_idx [T, G] does not name."""
    named = torch.zeros(len(scores), num_groups, dtype=torch.bool, device=scores.device).scatter_(1, group_idx, True)
    return (scores.view(len(scores), num_groups, -1) * named.unsqueeze(2)).view(scores.shape)


def count_bytes(*tensors: Any) -> int:
    """Return the bytes of tensors, tuples of tensors and None."""
    return sum(
        count_bytes(*t) if isinstance(t, Iterable) and not isinstance(t, Tensor) else t.nbytes
        for t in tensors
        if t is not None
    )
