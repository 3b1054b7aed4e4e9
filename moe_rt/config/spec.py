"""What a buffer is made for: sizes, dtype, placement and capacity, checked and compared between ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

from moe_rt import _engine
from moe_rt.errors import InvalidConfig, SizeOverflow

PROTOCOL_VERSION = 2

# Payload dtypes in the order of rows::Elem, and the accumulator each sums in (also the dtype of routing weights).
ELEMENTS: dict[torch.dtype, int] = {getattr(torch, name): i for i, (name, _) in enumerate(_engine.elements())}

# What rows may be coded as on the way, as Codec of cuda/protocol/core/codec.h; None sends them as they are.
CODECS: dict[torch.dtype | None, int] = {None: 0, torch.float8_e4m3fn: 1, torch.int8: 2}

Overflow = Literal["raise", "drop", "retry"]


def contiguous_placement(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Expert -> rank in contiguous blocks; the first num_experts % num_ranks ranks hold one expert more."""
    each, extra = divmod(num_experts, num_ranks)
    return tuple(r for r in range(num_ranks) for _ in range(each + (r < extra)))


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """The part of a buffer's configuration that every rank must share; `moe_rt.Buffer` explains each field."""

    num_ranks: int
    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: torch.dtype
    placement: tuple[int, ...]
    capacity_factor: float | None
    overflow: Overflow
    dispatch_dtype: torch.dtype | None = None
    combine_dtype: torch.dtype | None = None

    @classmethod
    def make(
        cls,
        *,
        num_ranks: int,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: torch.dtype,
        placement: Sequence[int] | None,
        capacity_factor: float | None,
        overflow: Overflow,
        dispatch_dtype: torch.dtype | None = None,
        combine_dtype: torch.dtype | None = None,
    ) -> BufferSpec:
        """Checks every field.

        Raises:
            InvalidConfig: naming the field, what was got and what was expected.
            SizeOverflow: when rows or bytes do not fit the protocol's types.
        """
        sizes = {
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "hidden": hidden,
            "num_topk": num_topk,
            "num_experts": num_experts,
        }
        for name, value in sizes.items():
            _expect(isinstance(value, int) and 0 < value < 2**31, name, value, "a positive 32-bit integer")
        _expect(num_experts >= num_ranks, "num_experts", num_experts, f"at least one for each of {num_ranks} ranks")
        _expect(
            num_topk <= min(num_experts, _engine.MAX_TOPK),
            "num_topk",
            num_topk,
            f"at most num_experts = {num_experts} and {_engine.MAX_TOPK}",
        )
        _expect(dtype in ELEMENTS, "dtype", dtype, f"one of {[str(d) for d in ELEMENTS]}")
        for name, codec in (("dispatch_dtype", dispatch_dtype), ("combine_dtype", combine_dtype)):
            expected = f"None or one of {[str(d) for d in CODECS if d]}, for rows of at most 32 bits"
            fits = codec in CODECS and not (codec and dtype is torch.float64)
            _expect(fits, name, f"{codec} for rows of {dtype}", expected)
        _expect(overflow in get_args(Overflow), "overflow", overflow, f"one of {get_args(Overflow)}")
        positive = capacity_factor is None or (math.isfinite(capacity_factor) and capacity_factor > 0)
        _expect(positive, "capacity_factor", capacity_factor, "None or a finite number > 0")
        table = contiguous_placement(num_experts, num_ranks) if placement is None else tuple(int(r) for r in placement)
        _expect(len(table) == num_experts, "placement", f"{len(table)} entries", f"num_experts = {num_experts} entries")
        _expect(set(table) == set(range(num_ranks)), "placement", sorted(set(table)), f"every rank of {num_ranks}")
        spec = cls(
            num_ranks=num_ranks,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            dtype=dtype,
            placement=table,
            capacity_factor=None if capacity_factor is None else float(capacity_factor),
            overflow=overflow,
            dispatch_dtype=dispatch_dtype,
            combine_dtype=combine_dtype,
        )
        rows = num_ranks * num_max_tokens_per_rank * num_topk
        if rows >= 2**31 or num_ranks >= 2**15:
            raise SizeOverflow(f"num_ranks * num_max_tokens_per_rank * num_topk: got {rows} rows, expected below 2**31")
        if num_max_tokens_per_rank * (hidden + 64) * dtype.itemsize * (2 + 2 * num_topk) >= 2**47:
            raise SizeOverflow(f"segment: got about 2**47 bytes or more for hidden = {hidden}, expected less")
        return spec

    @property
    def acc_dtype(self) -> torch.dtype:
        """Accumulators and routing weights: fp32, or fp64 for an fp64 payload."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def local_experts(self, rank: int) -> list[int]:
        """Global ids of a rank's experts, in local order."""
        return [e for e, r in enumerate(self.placement) if r == rank]

    def capacity(self, rank: int) -> int:
        """Rows of recv_x on `rank`, at first: the worst case R*T*min(K, L), or capacity_factor times balance."""
        num_local = self.placement.count(rank)
        tokens = self.num_ranks * self.num_max_tokens_per_rank
        worst = tokens * min(self.num_topk, num_local)
        if self.capacity_factor is None:
            return worst
        balanced = tokens * self.num_topk * num_local / self.num_experts
        return min(worst, max(1, math.ceil(self.capacity_factor * balanced)))

    def shape(self) -> _engine.Shape:
        """The same sizes as the engine's type."""
        return _engine.Shape(
            num_ranks=self.num_ranks,
            num_experts=self.num_experts,
            num_max_tokens=self.num_max_tokens_per_rank,
            hidden=self.hidden,
            num_topk=self.num_topk,
            elem_bytes=self.dtype.itemsize,
        )

    def record(self) -> dict[str, Any]:
        """Plain values for comparing ranks."""
        return {
            **asdict(self),
            "dtype": str(self.dtype),
            "dispatch_dtype": str(self.dispatch_dtype),
            "combine_dtype": str(self.combine_dtype),
            "placement": list(self.placement),
            "version": PROTOCOL_VERSION,
        }

    def hash(self) -> int:
        """64 bits that every header carries."""
        text = json.dumps(self.record(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _expect(condition: bool, field: str, got: object, expected: str) -> None:
    if not condition:
        raise InvalidConfig(f"{field}: got {got}, expected {expected}")
