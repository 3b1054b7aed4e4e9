"""Benchmark cases: one op on one group of ranks with one set of sizes, and the named cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from moe_rt.config.options import HeapKind
from moe_rt.config.placement import Placement
from moe_rt.config.topology import Topology
from moe_rt.errors import InvalidConfig
from moe_rt.lab.cluster.cluster import rate_in_bits
from moe_rt.memory.heaps import HEAPS

Op = Literal["dispatch", "combine", "pair", "layer"]
CHANGED = "*"
OPS: tuple[Op, ...] = ("dispatch", "combine", "pair", "layer")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op and its sizes. `tokens` is per rank; `intermediate` is the experts' inner size, used by the layer op only.

    With `nodes`, ranks are spread evenly over that many emulated nodes, and each node's link carries `rate`, such as
    "1gbit", in each direction; "" for no limit.
    """

    name: str = "custom"
    op: Op = "pair"
    ranks: int = 2
    tokens: int = 512
    hidden: int = 2048
    topk: int = 4
    experts: int = 16
    intermediate: int = 512
    dtype: str = "bf16"
    routing: str = "uniform"
    heap: HeapKind = "shm"
    nodes: int = 0
    rate: str = ""

    def __post_init__(self) -> None:
        for field in ("ranks", "tokens", "hidden", "topk", "experts", "intermediate"):
            if getattr(self, field) < 1:
                raise InvalidConfig(f"{field}: got {getattr(self, field)}, expected a positive integer")
        if self.topk > self.experts or self.ranks > self.experts:
            sizes = f"{self.topk} and {self.ranks}"
            raise InvalidConfig(f"topk and ranks: got {sizes}, expected at most experts = {self.experts} of each")
        if self.nodes and self.ranks % self.nodes:
            raise InvalidConfig(f"ranks: got {self.ranks}, expected a multiple of {self.nodes} nodes")
        if self.nodes and not HEAPS[self.heap].over_hosts:
            expected = " or ".join(repr(name) for name, heap in HEAPS.items() if heap.over_hosts)
            raise InvalidConfig(f"heap: got {self.heap!r} for ranks on several nodes, expected {expected}")
        if self.rate:
            rate_in_bits(self.rate)

    @property
    def on_gpu(self) -> bool:
        """True if ranks use GPUs: one each ("nvshmem", "gin") or one for all ("loopback")."""
        return HEAPS[self.heap].gpu

    @property
    def as_processes(self) -> bool:
        """True if ranks are processes, which torch.distributed needs, rather than threads of one process."""
        return HEAPS[self.heap].processes

    @property
    def topology(self) -> Topology:
        """Placement of the ranks: on one host, or in blocks on its emulated nodes."""
        return Topology(tuple(rank * (self.nodes or 1) // self.ranks for rank in range(self.ranks)))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token: H * b."""
        return self.hidden * self.torch_dtype.itemsize

    @property
    def local_experts(self) -> list[int]:
        """Number of experts on each rank; experts are placed in contiguous blocks."""
        placement = Placement.contiguous(self.experts, self.ranks)
        return [placement.num_local(rank) for rank in range(self.ranks)]

    @property
    def most_received_bytes(self) -> int:
        """Maximum bytes of a rank's received rows: every token of the group takes as many of its experts as
        possible."""
        return self.ranks * self.tokens * min(self.topk, max(self.local_experts)) * self.row_bytes

    @property
    def reserved_bytes(self) -> int:
        """Device memory that a rank of a shared GPU reserves: the rows that two ops receive, the experts' outputs, and
        as much for gradients."""
        return 6 * self.most_received_bytes

    def changed(self, **sizes: Any) -> Case:
        """Return the case with these fields replaced. Its name then gets a star, since the sizes are no longer the
        named case's."""
        return replace(self, **sizes, name=f"{self.name}{CHANGED}") if sizes else self

    def title(self) -> str:
        """Return the name and all sizes. The name is left out if the sizes are not the named case's."""
        name = "" if CHANGED in self.name else f"{self.name}: "
        return f"{name}{self.op}, {self.sizes()}, {self.dtype}, {self.routing} routing, {self.heap} heap"

    def sizes(self) -> str:
        sizes = f"R={self.ranks} T={self.tokens} H={self.hidden} K={self.topk} E={self.experts}"
        sizes += f" F={self.intermediate}" if self.op == "layer" else ""
        return sizes + (f" on {self.nodes} nodes, {self.rate or 'no limit'}" if self.nodes else "")

    def in_words(self) -> str:
        """Describe the case without case names or symbols."""
        what = {"pair": "dispatch and combine", "layer": "a mixture-of-experts layer"}.get(self.op, self.op)
        tokens = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        place = f" on {self.nodes} nodes" if self.nodes else ""
        return f"{what} of {tokens} on each of {self.ranks} ranks{place}, {self.hidden} {self.dtype} elements a token,"


DEEPSEEK_V3: dict[str, Any] = dict(hidden=7168, topk=8, experts=256, intermediate=2048)
QWEN3_MOE: dict[str, Any] = dict(hidden=2048, topk=8, experts=128, intermediate=768)  # Qwen3-30B-A3B
MIXTRAL: dict[str, Any] = dict(hidden=4096, topk=2, experts=8, intermediate=14336)  # Mixtral-8x7B
GPT_OSS: dict[str, Any] = dict(hidden=2880, topk=4, experts=128, intermediate=2880)  # gpt-oss-120b

NAMED = (
    # Real models, on one node of eight ranks.
    Case(name="deepseek-v3-prefill", ranks=8, tokens=4096, **DEEPSEEK_V3),
    Case(name="deepseek-v3-decode", ranks=8, tokens=128, **DEEPSEEK_V3),
    Case(name="qwen3-moe", ranks=8, tokens=4096, **QWEN3_MOE),
    Case(name="mixtral", ranks=8, tokens=4096, **MIXTRAL),
    Case(name="gpt-oss", ranks=8, tokens=4096, **GPT_OSS),
    # Smaller variants of these models, for two cores.
    Case(name="deepseek-v3-prefill-small", tokens=512, **{**DEEPSEEK_V3, "experts": 64}),
    Case(name="deepseek-v3-decode-small", tokens=16, **{**DEEPSEEK_V3, "experts": 64}),
    Case(name="qwen3-moe-small", tokens=512, **{**QWEN3_MOE, "experts": 32}),
    Case(name="mixtral-small", tokens=512, **MIXTRAL),
    Case(name="gpt-oss-small", tokens=512, **{**GPT_OSS, "experts": 32}),
    # Cases that the project's targets are stated for.
    Case(name="pair-2x512x2048"),
    Case(name="pair-4x512x2048", ranks=4),
    Case(name="pair-2x2048x7168", tokens=2048, hidden=7168, topk=8, experts=64),
    Case(name="dispatch-2x2048x7168", op="dispatch", tokens=2048, hidden=7168, topk=8, experts=64),
    Case(name="combine-2x2048x7168", op="combine", tokens=2048, hidden=7168, topk=8, experts=64),
    Case(name="decode-2x1x7168", tokens=1, hidden=7168, topk=8, experts=64),
    Case(name="layer-qwen3-small", op="layer", tokens=2048, hidden=1024, topk=4, experts=32, intermediate=512),
)
CASES = {case.name: case for case in NAMED}
DEFAULT_CASE = "pair-2x512x2048"
