"""Rings in shared memory, which rows pass through if an op is given few multiprocessors (cuda/device/ring.h)."""

from __future__ import annotations

import os

from moe_rt import _engine
from moe_rt.config.spec import BufferSpec

# Up to this many blocks, loads into registers leave some GPU's links idle (moe_rt/gpucheck/estimate.py).
RING_BLOCKS = 39
RING_SOURCE = "kernels_ring.cu"
# Kernels that move rows as they are.
RING_KERNELS = ("dispatch_send", "dispatch_receive", "combine_backward_send")
_UNIT = 16  # a bulk copy moves a multiple of this, in bytes
RING_LANES_BYTES = 32 << 10  # bytes that a block has in flight in registers
RING_VARIABLE, _OFF = "MOE_RT_RING", "0"


def ring_for(
    spec: BufferSpec, num_sms: int | None, *, scratch_bytes: int, bulk_bytes: int, warps: int
) -> _engine.RingMemory | None:
    """Return the rings of a block's warps, or None if rows go through registers.

    Args:
        num_sms: multiprocessors that the caller gives an op, if any.
        scratch_bytes: shared memory of a block that is in use.
        bulk_bytes: shared memory that a block may have; 0 without bulk copies.
    """
    if num_sms is None or num_sms > RING_BLOCKS or os.environ.get(RING_VARIABLE) == _OFF:
        return None
    if bulk_bytes == 0 or spec.hidden * spec.dtype.itemsize % _UNIT:
        return None
    ring = _engine.RingMemory(scratch_bytes=scratch_bytes, block_bytes=bulk_bytes, warps=warps, num_topk=spec.num_topk)
    return ring if under_way(ring, warps) > RING_LANES_BYTES else None


def under_way(ring: _engine.RingMemory, warps: int) -> int:
    """Maximum bytes of rows in flight into a block's shared memory."""
    return warps * _engine.RING_LOADS * ring.piece
