"""Tuning constants that the host passes to an engine at run time. None changes a bit of any result.

cuda/protocol/core/tuning.h has the others, which compilers need. A number stands in one of the two only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from moe_rt import _engine
from moe_rt.errors import expect

# SwiGLU on a GPU belongs to no buffer: lanes of a block, and blocks per multiprocessor. All blocks of a launch fit on
# the GPU together, so that no second, emptier wave runs.
ACTIVATION_THREADS, ACTIVATION_BLOCKS_PER_SM = 256, 4
_WARP, _MOST_THREADS = 32, 1024


def _shared(default: int) -> Any:
    return field(default=default, metadata={"shared": True})


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Numbers that decide how fast a buffer's ops are, and change no bit of their results.

    Fields marked *shared* decide the layout of memory and must be identical on every rank. Values for GPUs follow from
    formulas (docs/cuda.md) and were not measured; docs/log.md has the measurements on CPUs.

    Attributes:
        pushed_tokens: shared; tokens up to which GPUs write their lists to each other, which saves three waits for a
            peer. This memory grows with the number of ranks.
        pushed_rows: shared; tokens up to which they also write rows, which saves a fourth wait.
        pushed_bytes: shared; maximum bytes of a window for such rows: 16 MiB hold 64 rows of 8192 bf16 from 16 ranks.
        network_threads: shared; lanes of a block if peers are reached over a network. Half of `threads`, because the
            network library's functions also take registers.
        threads: lanes of a block otherwise: 512 leave each 128 registers, with which sums of eight rows do not spill.
        wait_apart_tokens: tokens of a rank from which one block waits for the peers before all move rows, so that a
            late rank does not occupy this GPU. The extra launch takes a few microseconds, a hundredth of such an op.
        sending_part: virtual ranks that share a GPU leave one multiprocessor in this many free of waits, for launches
            that send.
        ring_blocks: blocks up to which rows go through rings in shared memory; 0 switches rings off. Loads into
            registers leave a B200's links idle up to 39 blocks, by formula.
        ring_bytes: bytes that a block must have in flight in its rings, or else rows go through registers, which hold
            this many.
        near_ns: maximum time to read a line that a peer has just written, in ns, for which both count as sharing a
            cache. It is between the measured 20 and 100.
        stream_shares: shares of the last-level cache from which rows are stored past it, for rows published, received,
            pushed and combined; None for those measured with the instruction set.
        recycled_bytes: size from which an output's memory is recycled by the engine: fresh pages dominate the time of
            large dispatches. The allocator's free lists recycle smaller ones.
    """

    pushed_tokens: int = _shared(128)
    pushed_rows: int = _shared(64)
    pushed_bytes: int = _shared(16 << 20)
    network_threads: int = _shared(256)
    threads: int = 512
    wait_apart_tokens: int = 1024
    sending_part: int = 8
    ring_blocks: int = 39
    ring_bytes: int = 32 << 10
    near_ns: float = _engine.NEAR_NS
    stream_shares: tuple[float, float, float, float] | None = None
    recycled_bytes: int = 1 << 20

    def check(self) -> None:
        """Check every field.

        Raises:
            InvalidConfig: a value is invalid; names the field, what was got and what was expected.
        """
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int":
                least = 1 if f.name == "sending_part" else 0
                valid = type(value) is int and least <= value < 2**31
                expect(valid, f"tuning.{f.name}", value, f"an integer in [{least}, 2**31)")
        for name in ("threads", "network_threads"):
            value = getattr(self, name)
            valid = 0 < value <= _MOST_THREADS and value % _WARP == 0
            expect(valid, f"tuning.{name}", value, f"a multiple of {_WARP}, at most {_MOST_THREADS}")
        expect(self.near_ns >= 0, "tuning.near_ns", self.near_ns, "nanoseconds >= 0")
        shares = self.stream_shares
        if shares is not None:
            valid = isinstance(shares, tuple) and len(shares) == 4 and all(0 <= s < math.inf for s in shares)
            expect(valid, "tuning.stream_shares", shares, "None or four finite shares >= 0")

    def shared(self) -> dict[str, int]:
        """Return the fields that must be identical on all ranks, by the names in messages."""
        return {f"tuning.{f.name}": getattr(self, f.name) for f in fields(self) if f.metadata}
