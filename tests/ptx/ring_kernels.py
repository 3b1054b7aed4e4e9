"""A GPU whose compiled kernels have small rings, so that short rows span several pieces."""

from __future__ import annotations

from typing import Any

from ptx.gpu import PtxGpu, set_default_tuning


class RingGpu(PtxGpu):
    """Slots have 256 bytes, and fewer of them exist than it takes to have more in flight than lanes have."""

    bulk_bytes = 48 << 10

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        set_default_tuning(ring_bytes=0)
