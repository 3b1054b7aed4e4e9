"""Bytes that DeepEP V2 requires for ranks of one domain. They decide which buffers it would refuse."""

from __future__ import annotations

from moe_rt.errors import expect

ALIGNMENT = 2 << 20  # of a buffer's size
_WIDEST_TOPK, _SMALLEST_BLOCK = 32, 32  # sizes are made for these if others are not known
_SECTION = 32  # parts of a token begin at multiples of this number of bytes


def dispatch_bytes(num_ranks: int, num_max_tokens: int, row_bytes: int, num_scales: int, num_topk: int) -> int:
    """Return the bytes that DeepEP requires for a dispatch of such rows."""
    token = _up(row_bytes) + _up(4 * num_scales) + _up(num_topk * 8 + (1 + num_topk) * 4)
    return num_ranks * num_max_tokens * token


def combine_bytes(num_ranks: int, num_max_tokens: int, hidden: int, num_topk: int, several_sums: bool) -> int:
    """Return the bytes that DeepEP requires for a combine of such rows."""
    token = _up(2 * hidden) + _up(num_topk * 8)
    return (min(num_ranks, num_topk) if several_sums else num_topk) * num_max_tokens * token


def elastic_bytes(
    num_ranks: int, num_max_tokens: int, hidden: int, num_topk: int, use_fp8_dispatch: bool, several_sums: bool
) -> int:
    """Return the size of a buffer for these ops, a multiple of 2 MiB.

    Raises:
        InvalidConfig: a size is not positive.
    """
    expect(num_max_tokens > 0, "num_max_tokens_per_rank", num_max_tokens, "a positive number, or num_bytes")
    expect(hidden > 0, "hidden", hidden, "a positive number, or num_bytes")
    num_topk = num_topk or _WIDEST_TOPK
    row_bytes = hidden if use_fp8_dispatch else 2 * hidden
    num_scales = -(-hidden // _SMALLEST_BLOCK) if use_fp8_dispatch else 0
    needed = max(
        dispatch_bytes(num_ranks, num_max_tokens, row_bytes, num_scales, num_topk),
        combine_bytes(num_ranks, num_max_tokens, hidden, num_topk, several_sums),
    )
    return -(-needed // ALIGNMENT) * ALIGNMENT


def _up(number: int) -> int:
    return -(-number // _SECTION) * _SECTION
