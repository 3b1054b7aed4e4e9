"""Rings in shared memory, through which rows move where an op is given few multiprocessors: cuda/device/ring.h."""

from __future__ import annotations

import os

from moe_rt import _engine
from moe_rt.config.spec import BufferSpec

# Blocks up to which loads into registers leave some GPU's links idle (moe_rt/gpucheck/estimate.py).
RING_BLOCKS = 39
RING_SOURCE = "kernels_ring.cu"
# Kernels that move rows as they are.
RING_KERNELS = ("dispatch_send", "dispatch_receive", "combine_backward_send")
_UNIT = 16  # bytes that a bulk copy moves a multiple of
RING_LANES_BYTES = 32 << 10  # bytes that a block has under way in registers
RING_VARIABLE, _OFF = "MOE_RT_RING", "0"


def ring_for(
    spec: BufferSpec, num_sms: int | None, *, scratch_bytes: int, bulk_bytes: int, warps: int
) -> _engine.RingMemory | None:
    """The rings of a block's warps, or None where rows go through registers.

    Args:
        num_sms: what the caller gives an op, if anything.
        scratch_bytes: shared memory of a block that is taken.
        bulk_bytes: shared memory that a block may have; 0 where there are no bulk copies.
    """
    if num_sms is None or num_sms > RING_BLOCKS or os.environ.get(RING_VARIABLE) == _OFF:
        return None
    if bulk_bytes == 0 or spec.hidden * spec.dtype.itemsize % _UNIT:
        return None
    ring = _engine.RingMemory(scratch_bytes=scratch_bytes, block_bytes=bulk_bytes, warps=warps, num_topk=spec.num_topk)
    return ring if under_way(ring, warps) > RING_LANES_BYTES else None


def under_way(ring: _engine.RingMemory, warps: int) -> int:
    """Bytes of rows that are on their way into a block's shared memory, at most."""
    return warps * _engine.RING_LOADS * ring.piece
