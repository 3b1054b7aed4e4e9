"""The fp8 cast of DeepEP's low-latency dispatch: one scale for each 128 elements."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, LARGEST, SMALLEST_AMAX = 128, 448.0, 1e-4


def cast(x: Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x [T, H]; codes * scales are about x.

    Args:
        round_scale: round scales up to powers of two.
        use_ue8m0: scales are exponents, four to an int32.

    Returns:
        float8_e4m3fn [T, H], and float32 [T, H / 128] or int32 [T, H / 512].
    """
    blocks = x.float().view(len(x), x.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(2).clamp(min=SMALLEST_AMAX)
    scales, factors = amax * (1 / LARGEST), LARGEST / amax
    if round_scale:
        exponents = _exponent_up(scales)
        scales, factors = torch.exp2(exponents), torch.exp2(-exponents)
    codes = (blocks * factors.unsqueeze(2)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(x.shape)
    if not use_ue8m0:
        return codes, scales
    return codes, (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)


def _exponent_up(scales: Tensor) -> Tensor:
    """Return the exponent of the smallest power of two that is at least each scale."""
    mantissas, exponents = torch.frexp(scales)
    return torch.where(mantissas == 0.5, exponents - 1, exponents).float()
