"""Checks of DeepEP's operands that both its buffers make; each error says what was got and what was expected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt.errors import InvalidInput, InvalidRouting

_SCALES = (torch.float32, torch.int32)


def invalid(rank: int, name: str, got: object, expected: str) -> InvalidInput:
    """Return the error for an argument of an op."""
    return InvalidInput(f"rank {rank}: {name}: got {got}, expected {expected}", rank=rank)


def spelled(value: object) -> str:
    """Describe a tensor by its dtype and shape, anything else by its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    device = "" if value.is_cpu else f" on {value.device}"
    return f"{value.dtype} {list(value.shape)}{device}" + ("" if value.is_contiguous() else ", not contiguous")


def twice(rank: int) -> InvalidRouting:
    """Return the error for a token that names an expert twice."""
    message = "topk_idx: got an expert twice for a token, expected different experts; sum their weights first"
    return InvalidRouting(f"rank {rank}: {message}", rank=rank)


def parts_of(x: Any) -> tuple[Any, Any]:
    """Return rows and None, or codes and their scales."""
    return x if type(x) is tuple and len(x) == 2 else (x, None)


def wrong_rows(rank: int, x: Any, num_tokens: int | None = None) -> InvalidInput | None:
    """Return the error of rows to dispatch: bfloat16 [T, H], or 1-byte codes [T, H] with scales [T, S]."""
    codes, scales = parts_of(x)
    size = 2 if scales is None else 1
    if (
        not isinstance(codes, Tensor) or codes.dim() != 2 or not codes.is_contiguous() or codes.itemsize != size
        or (scales is None and codes.dtype is not torch.bfloat16) or codes.shape[1] * size % 16
        or (num_tokens is not None and codes.shape[0] != num_tokens)
    ):  # fmt: skip
        rows = "T" if num_tokens is None else num_tokens
        expected = f"contiguous bfloat16 [{rows}, H], or a tuple of codes [{rows}, H] and scales, rows of 16 n bytes"
        return invalid(rank, "x", spelled(codes), expected)
    if scales is not None and (
        not isinstance(scales, Tensor) or scales.dim() != 2 or len(scales) != len(codes) or scales.dtype not in _SCALES
        or scales.device != codes.device
    ):  # fmt: skip
        return invalid(rank, "x", spelled(scales), f"scales of float32 or int32 [{len(codes)}, S] on {codes.device}")
    return None


def wrong_tensor(
    rank: int, name: str, t: Any, dtype: torch.dtype, shape: tuple[int | str, ...], like: Tensor
) -> InvalidInput | None:
    """Return the error of a tensor that is not contiguous, of this dtype and shape, on the device of another one."""
    if (
        isinstance(t, Tensor)
        and t.dtype is dtype
        and t.shape == shape
        and t.is_contiguous()
        and t.device == like.device
    ):
        return None
    return invalid(rank, name, spelled(t), f"contiguous {dtype} [{', '.join(map(str, shape))}] on {like.device}")


def wrong_ids(rank: int, topk_idx: Any, num_tokens: int, like: Tensor) -> InvalidInput | None:
    """Return the error of a routing that is not contiguous int64 [T, K], on the device of another tensor."""
    num_topk = topk_idx.shape[1] if isinstance(topk_idx, Tensor) and topk_idx.dim() == 2 else "K"
    return wrong_tensor(rank, "topk_idx", topk_idx, torch.int64, (num_tokens, num_topk), like)
