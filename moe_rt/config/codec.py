"""Codecs of rows in transit: unchanged, or one byte per element."""

from __future__ import annotations

from enum import IntEnum

import torch


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
