"""Options of a buffer other than its sizes; every name and default is defined here once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from moe_rt.config.codec import Codec
from moe_rt.config.placement import Placement
from moe_rt.config.tuning import Tuning
from moe_rt.errors import expect

# Providers of symmetric memory; see docs/heap.md. moe_rt/memory/heaps.py has a row for each.
HeapKind = Literal["shm", "ucx", "threads", "loopback", "nvshmem", "gin"]
Overflow = Literal["raise", "drop", "retry"]
# Paths of rows between ranks of different nodes; moe_rt.Buffer explains both.
Route = Literal["flat", "two_level"]
# Meanings of a row of recv_x; moe_rt.Buffer explains both.
RecvLayout = Literal["experts", "tokens"]
# Orders in which a token's rows are added up, in the order of the engine's Sums; moe_rt.Buffer explains both.
Sums = Literal["ranked", "invariant"]
ALIGNMENTS = (1, 8, 16, 32, 128)  # allowed values of expert_alignment, in rows


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """The options that must be identical on all ranks, of `tuning` only some; `moe_rt.Buffer` explains each."""

    capacity_factor: float | None = None
    overflow: Overflow = "raise"
    dispatch_dtype: torch.dtype | None = None
    combine_dtype: torch.dtype | None = None
    route: Route | Literal["auto"] = "auto"
    sums: Sums = "ranked"
    depth: int = 1
    tuning: Tuning = field(default=Tuning(), repr=False)

    def check_shared(self, dtype: torch.dtype) -> None:
        """Check these options for rows of `dtype`.

        Raises:
            InvalidConfig: a value is invalid; names the field, what was got and what was expected.
        """
        for name in ("dispatch_dtype", "combine_dtype"):
            codes = getattr(self, name)
            fits = codes is None or (codes in Codec.dtypes() and dtype is not torch.float64)
            expected = f"None or one of {[str(d) for d in Codec.dtypes()]}, for rows of at most 32 bits"
            expect(fits, name, f"{codes} for rows of {dtype}", expected)
        expect(self.overflow in get_args(Overflow), "overflow", self.overflow, f"one of {get_args(Overflow)}")
        routes = ("auto", *get_args(Route))
        expect(self.route in routes, "route", self.route, f"one of {routes}")
        expect(self.sums in get_args(Sums), "sums", self.sums, f"one of {get_args(Sums)}")
        depth = self.depth
        expect(isinstance(depth, int) and 0 < depth < 2**31, "depth", depth, "a positive 32-bit integer")
        retries = self.overflow == "retry" and depth > 1
        expect(not retries, "overflow", "retry", f'"raise" or "drop" with depth = {depth}: ranks may wait in any order')
        factor = self.capacity_factor
        positive = factor is None or (math.isfinite(factor) and factor > 0)
        expect(positive, "capacity_factor", factor, "None or a finite number > 0")
        expect(isinstance(self.tuning, Tuning), "tuning", self.tuning, "a moe_rt.Tuning")
        self.tuning.check()


@dataclass(frozen=True, kw_only=True)
class BufferOptions(SharedOptions):
    """All options of a buffer; `moe_rt.Buffer` explains each. Values are checked when all ranks make the buffer."""

    placement: Placement | Sequence[int] | None = None
    heap: HeapKind | Literal["auto"] = field(default="auto", repr=False)
    timeout_s: float = field(default=120.0, repr=False)
    init_timeout_s: float = field(default=300.0, repr=False)
    num_threads: int = field(default=1, repr=False)
    num_sms: int | None = field(default=None, repr=False)

    def check_own(self) -> None:
        """Check the options that concern only this rank.

        Raises:
            InvalidConfig: a value is invalid; names the field, what was got and what was expected.
        """
        positive = self.timeout_s > 0 and self.init_timeout_s > 0  # False for NaN
        expect(positive, "timeout_s", f"{self.timeout_s} and {self.init_timeout_s}", "positive seconds")
        expect(self.num_threads >= 1, "num_threads", self.num_threads, "at least 1")

    def arguments(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `moe_rt.Buffer`, with hashable values."""
        values = {f.name: getattr(self, f.name) for f in fields(BufferOptions)}
        if values["placement"] is not None and not isinstance(values["placement"], Placement):
            values["placement"] = tuple(values["placement"])
        return values
