"""How rows travel: as they are, or coded in one byte an element."""

from __future__ import annotations

from enum import IntEnum

import torch


class Codec(IntEnum):
    """Codec of cuda/protocol/core/codec.h, by the same numbers."""

    RAW = 0
    FP8 = 1
    INT8 = 2

    @property
    def dtype(self) -> torch.dtype | None:
        """What users call it, as in `moe_rt.Buffer(dispatch_dtype=...)`: the dtype of its codes, None for RAW."""
        return _DTYPES[self]

    @property
    def enumerator(self) -> str:
        """Its name in C++."""
        return f"k{self.name.capitalize()}"

    @classmethod
    def of(cls, dtype: torch.dtype | None) -> Codec:
        """The one with this dtype; KeyError if there is none."""
        return _CODECS[dtype]

    @classmethod
    def dtypes(cls) -> list[torch.dtype]:
        """Of the codes of all codecs that have some."""
        return [codec.dtype for codec in cls if codec.dtype is not None]


_DTYPES = {Codec.RAW: None, Codec.FP8: torch.float8_e4m3fn, Codec.INT8: torch.int8}
_CODECS = {dtype: codec for codec, dtype in _DTYPES.items()}
