"""The specification of a buffer: sizes, dtype, placement and capacity, checked and compared between ranks."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch

from moe_rt import _engine
from moe_rt.config.options import ALIGNMENTS, BufferOptions, RecvLayout, SharedOptions, Sums
from moe_rt.config.placement import Placement
from moe_rt.config.topology import Topology
from moe_rt.errors import SizeOverflow, expect

PROTOCOL_VERSION = 7

# Dtypes of rows in the order of rows::Elem, and the accumulator each sums in (also the dtype of routing weights).
ELEMENTS: dict[torch.dtype, int] = {getattr(torch, name): i for i, (name, _) in enumerate(_engine.elements())}


@dataclass(frozen=True, kw_only=True)
class BufferSpec(SharedOptions):
    """The part of a buffer's configuration that every rank must share; `moe_rt.Buffer` explains each field."""

    topology: Topology
    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: torch.dtype
    placement: Placement
    layout: RecvLayout
    expert_alignment: int

    @classmethod
    def make(
        cls,
        topology: Topology,
        options: BufferOptions,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: torch.dtype,
        layout: RecvLayout = "experts",
        expert_alignment: int = 1,
    ) -> BufferSpec:
        """Return the spec, after checking every field.

        Raises:
            InvalidConfig: a value is invalid; names the field, what was got and what was expected.
            SizeOverflow: the number of rows or bytes does not fit the protocol's types.
        """
        sizes: dict[str, Any] = {
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "hidden": hidden,
            "num_topk": num_topk,
            "num_experts": num_experts,
        }
        for name, value in sizes.items():
            expect(isinstance(value, int) and 0 < value < 2**31, name, value, "a positive 32-bit integer")
        num_ranks, most_topk = topology.num_ranks, _engine.MAX_TOPK
        expect(num_experts >= num_ranks, "num_experts", num_experts, f"at least one for each of {num_ranks} ranks")
        most = f"at most num_experts = {num_experts} and {most_topk}"
        expect(num_topk <= min(num_experts, most_topk), "num_topk", num_topk, most)
        expect(dtype in ELEMENTS, "dtype", dtype, f"one of {[str(d) for d in ELEMENTS]}")
        expect(layout in get_args(RecvLayout), "layout", layout, f"one of {get_args(RecvLayout)}")
        whole = isinstance(expert_alignment, int) and expert_alignment in ALIGNMENTS
        expect(whole, "expert_alignment", expert_alignment, f"one of {ALIGNMENTS}")
        fits = expert_alignment == 1 or layout == "experts"
        expect(fits, "expert_alignment", expert_alignment, '1 with layout="tokens"')
        sizes["expert_alignment"] = int(expert_alignment)  # True is 1, but has another hash
        options.check_shared(dtype)
        expected = '"ranked" with layout="tokens", whose rows are sums over the experts of one rank'
        expect(options.sums == "ranked" or layout == "experts", "sums", options.sums, expected)
        shared = {f.name: getattr(options, f.name) for f in fields(SharedOptions)}
        shared["depth"] = int(options.depth)  # as expert_alignment
        if options.capacity_factor is not None:
            shared["capacity_factor"] = float(options.capacity_factor)
        placement = Placement.make(options.placement, num_experts, num_ranks)
        spec = cls(topology=topology, dtype=dtype, placement=placement, layout=layout, **sizes, **shared)
        rows = num_ranks * num_max_tokens_per_rank * num_topk + num_experts * (expert_alignment - 1)
        if num_ranks >= 2**15:
            raise SizeOverflow(f"group: got {num_ranks} ranks, expected below 2**15")
        if rows >= 2**31:
            raise SizeOverflow(f"num_ranks * num_max_tokens_per_rank * num_topk: got {rows} rows, expected below 2**31")
        if options.depth * num_max_tokens_per_rank * (hidden + 64) * dtype.itemsize * (2 + 2 * num_topk) >= 2**47:
            raise SizeOverflow(f"segment: got about 2**47 bytes or more for hidden = {hidden}, expected less")
        return spec

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the group (R)."""
        return self.topology.num_ranks

    @property
    def acc_dtype(self) -> torch.dtype:
        """Dtype of accumulators and routing weights: fp32, or fp64 for fp64 rows."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def by_token(self) -> bool:
        """True if a token has one row on each rank that it visits, instead of one for each of its experts there."""
        return self.layout == "tokens"

    def capacity(self, rank: int, max_tokens: int | None = None) -> int:
        """Return the initial number of rows of recv_x on `rank`: the worst case, or capacity_factor balanced loads.

        The worst case is R*T*min(K, L), or R*T with layout="tokens"; T is max_tokens if given, else
        num_max_tokens_per_rank. The maximum padding that expert_alignment may need is added to both.
        """
        num_local = self.placement.num_local(rank)
        tokens = self.num_ranks * (max_tokens or self.num_max_tokens_per_rank)
        worst = tokens if self.by_token else tokens * min(self.num_topk, num_local)
        rows = worst
        if self.capacity_factor is not None:
            balanced = tokens * self.num_topk * num_local / self.num_experts
            rows = min(worst, max(1, math.ceil(self.capacity_factor * balanced)))
        step = self.expert_alignment
        return -(-(rows + num_local * (step - 1)) // step) * step

    def shape(self, *, pushes: bool = False) -> _engine.Shape:
        """Return the sizes as the engine's type. `pushes` includes the memory for lists and rows that GPUs push."""
        tokens, align = self.num_max_tokens_per_rank, _engine.ROW_ALIGN
        row_bytes = -(-self.hidden * self.dtype.itemsize // align) * align
        tuning = self.tuning
        rows = min(tokens, tuning.pushed_rows, tuning.pushed_bytes // (self.num_ranks * row_bytes))
        return _engine.Shape(
            num_ranks=self.num_ranks,
            num_experts=self.num_experts,
            num_max_tokens=self.num_max_tokens_per_rank,
            hidden=self.hidden,
            num_topk=self.num_topk,
            elem_bytes=self.dtype.itemsize,
            by_token=self.by_token,
            alignment=self.expert_alignment,
            num_pushed_tokens=min(tokens, tuning.pushed_tokens) if pushes else 0,
            num_pushed_rows=rows if pushes else 0,
            sums=get_args(Sums).index(self.sums),
            depth=self.depth,
            node_of=self.node_of,
        )

    def gpu_shape(self) -> _engine.Shape:
        """Return the shape of GPU ranks, which push unless rows travel in two levels."""
        return self.shape(pushes=not self.node_of)

    @property
    def node_of(self) -> list[int]:
        """Node of each rank if rows travel in two levels, else an empty list."""
        return list(self.topology.nodes) if self.route == "two_level" else []

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a `moe_rt.Buffer` with this spec; the group gives the topology."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "topology"}

    def record(self) -> dict[str, Any]:
        """Return the spec as plain values, for comparison between ranks."""
        arguments = self.arguments()
        del arguments["tuning"]
        return {
            **{name: str(v) if name.endswith("dtype") else v for name, v in arguments.items()},
            **self.tuning.shared(),
            "topology": list(self.topology.nodes),
            "placement": list(self.placement.ranks),
            "version": PROTOCOL_VERSION,
        }

    def hash(self) -> int:
        """Return a 64-bit hash, which every header carries."""
        text = json.dumps(self.record(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
