"""Codecs of a buffer's rows, and formats of rows that come with scales of their own."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Codec(IntEnum):
    """Codecs, with the values of Codec in cuda/protocol/core/codec.h."""

    RAW = 0
    FP8 = 1
    INT8 = 2

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of its codes, by which users name it in `moe_rt.Buffer(dispatch_dtype=...)`; None for RAW."""
        return _DTYPES[self]

    @property
    def enumerator(self) -> str:
        """Name of its C++ enumerator."""
        return f"k{self.name.capitalize()}"

    @classmethod
    def of(cls, dtype: torch.dtype | None) -> Codec:
        """Return the codec with this dtype. Raise KeyError if none has it."""
        return _CODECS[dtype]

    @classmethod
    def dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes of all codecs except RAW."""
        return [codec.dtype for codec in cls if codec.dtype is not None]


_DTYPES = {Codec.RAW: None, Codec.FP8: torch.float8_e4m3fn, Codec.INT8: torch.int8}
_CODECS = {dtype: codec for codec, dtype in _DTYPES.items()}

# Dtypes of codes and of scales. The word contains indices into these tuples.
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
SCALES = (torch.float32, torch.int32, torch.uint8)
_COUNT_BITS, _DTYPE_BITS = 24, 3
MOST_SCALES = (1 << _COUNT_BITS) - 1
_ALIGN = 16  # alignment of a row's scales in a window: RowParts of cuda/protocol/core/codec.h


class RowFormat(NamedTuple):
    """Format of one token in two tensors: dtype and number of its codes, and of its scales."""

    codes: torch.dtype
    num_codes: int
    scales: torch.dtype
    num_scales: int

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> RowFormat:
        """Return the format of codes [T, C] and scales [T, S]."""
        return cls(codes.dtype, codes.shape[-1], scales.dtype, scales.shape[-1])

    @classmethod
    def of_codec(cls, codes: torch.dtype | None, hidden: int) -> RowFormat:
        """Return the format of a buffer's codec: one fp32 scale per 128 elements. Ops without a codec are refused."""
        return cls(codes or CODES[0], hidden, torch.float32, -(-hidden // 128))

    @property
    def code_bytes(self) -> int:
        """Bytes of a row of codes."""
        return self.num_codes * self.codes.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row of scales."""
        return self.num_scales * self.scales.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of both in a window."""
        return -(-self.code_bytes // _ALIGN) * _ALIGN + self.scale_bytes

    def word(self, hidden: int) -> int:
        """Return 32 bits that encode the format, for rows of `hidden` elements; never 0, the word of plain rows."""
        packed = self.num_codes != hidden  # two codes per byte
        dtypes = CODES.index(self.codes) << _DTYPE_BITS | SCALES.index(self.scales)
        return 1 << 31 | int(packed) << 30 | dtypes << _COUNT_BITS | self.num_scales


def spelled(word: int) -> str:
    """Describe a word in English; a peer's word may be invalid."""
    if word & 0xFFFFFFFF == 0:
        return "rows without scales"
    dtypes, mask = word >> _COUNT_BITS & (1 << 2 * _DTYPE_BITS) - 1, (1 << _DTYPE_BITS) - 1
    codes, scales = dtypes >> _DTYPE_BITS, dtypes & mask
    if codes >= len(CODES) or scales >= len(SCALES):
        return f"rows of an unknown kind ({word & 0xFFFFFFFF:#x})"
    packed = ", two in a byte," if word >> 30 & 1 else ""
    return f"codes of {CODES[codes]}{packed} with {word & MOST_SCALES} scales of {SCALES[scales]}"
