"""A GPU whose compiled kernels have small rings, so that short rows span several pieces."""

from __future__ import annotations

from typing import Any

from ptx.gpu import PtxGpu

from moe_rt.engine.gpu import launcher


class RingGpu(PtxGpu):
    """Slots have 256 bytes, and fewer of them exist than it takes to have more in flight than lanes have."""

    bulk_bytes = 48 << 10

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        launcher.RING_LANES_BYTES = 0
