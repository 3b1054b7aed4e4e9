"""Memory of a buffer, exact to the byte: symmetric memory as the heap reserves it, and what an op allocates.

Sizes come from the engine's own layout, so they cannot drift from it; docs/protocol.md has the formula. Buffers of
other libraries follow published formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moe_rt.config.options import BufferOptions, HeapKind
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.errors import expect
from moe_rt.memory.heaps import HEAPS


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        symmetric: the segment, `Buffer.num_bytes`.
        received: recv_x, recv_weights and offs of one dispatch at full capacity.
        handle: the plans that combine and backward need.
    """

    symmetric: int
    received: int
    handle: int

    @property
    def total(self) -> int:
        """All of them, for one dispatch whose outputs are alive."""
        return self.symmetric + self.received + self.handle


def buffer_memory(
    topology: Topology, heap: HeapKind = "shm", options: BufferOptions | None = None, *, rank: int = 0, **sizes: Any
) -> Memory:
    """Return the memory of one rank of a `moe_rt.Buffer`.

    Args:
        topology: the node of each rank.
        sizes: those of `moe_rt.Buffer`: num_max_tokens_per_rank, hidden, num_topk, num_experts, dtype, and optionally
            layout and expert_alignment.

    Raises:
        InvalidConfig: a value is invalid; names the field, what was got and what was expected.
        SizeOverflow: the number of rows or bytes does not fit the protocol's types.
    """
    expect(heap in HEAPS, "heap", heap, f"one of {list(HEAPS)}")
    expect(0 <= rank < topology.num_ranks, "rank", rank, f"0 to {topology.num_ranks - 1}")
    spec = BufferSpec.make(topology, options or BufferOptions(), **sizes)
    # This repeats what moe_rt.engine.backend.choose_route decides.
    asked, traits = spec.route == "two_level", HEAPS[heap]
    gains = topology.num_nodes > 1 if asked or traits.gpu else topology.shares_nodes
    two_level = gains and (asked or (spec.route == "auto" and traits.network))
    spec = replace(spec, route="two_level" if two_level else "flat")
    shape = spec.gpu_shape() if HEAPS[heap].gpu else spec.shape()
    local, capacity = spec.placement.num_local(rank), spec.capacity(rank)
    weight = spec.acc_dtype.itemsize
    weights = capacity * (spec.num_topk if spec.by_token else 1) * weight
    parts = spec.num_ranks if spec.by_token else local  # entries of offs
    received = capacity * spec.hidden * spec.dtype.itemsize + weights + 4 * parts
    plans = 4 * shape.recv_plan_ints(local) + 4 * spec.num_max_tokens_per_rank * spec.num_topk
    return Memory(shape.segment_bytes(), received, plans)


def deepep_low_latency_bytes(tokens: int, hidden: int, ranks: int, experts: int) -> int:
    """Return the RDMA buffer of DeepEP V1's low-latency mode, by its published size hint.

    A dispatch message holds 16 bytes and the larger of bf16 rows and fp8 rows with scales; a combine message holds a
    bf16 row and its scales' minimum and maximum. Both directions are kept twice, for every expert.

    Raises:
        InvalidConfig: experts do not divide by ranks, or a size is not positive.
    """
    for name, value in (("tokens", tokens), ("hidden", hidden), ("ranks", ranks), ("experts", experts)):
        expect(value > 0, name, value, "a positive number")
    expect(experts % ranks == 0, "experts", experts, f"a multiple of ranks = {ranks}")
    scales = hidden // 128
    dispatch = 16 + max(hidden * 2, hidden + scales * 4)
    combine = scales * 4 + hidden * 2
    send = max(tokens * dispatch, experts * tokens * combine)
    receive = max(experts * tokens * dispatch, experts * tokens * combine)
    signals = -(-experts * 4 // 128) * 128
    return -(-2 * (send + receive + signals) // 128) * 128


def hybridep_bytes(tokens: int, hidden: int, ranks_of_domain: int, domains: int, local_experts: int) -> int:
    """Return the buffers of HybridEP for bf16 rows: worst-case rows, probabilities and staging of other domains.

    A rank can receive every token of every rank once per dispatch, and returns as many rows; between domains it stages
    one copy of each token of its peers of the same index, in both directions.

    Raises:
        InvalidConfig: a size is not positive.
    """
    sizes = {"tokens": tokens, "hidden": hidden, "ranks_of_domain": ranks_of_domain, "domains": domains}
    for name, value in (sizes | {"local_experts": local_experts}).items():
        expect(value > 0, name, value, "a positive number")
    row, probabilities = 2 * hidden, 4 * local_experts * ranks_of_domain
    worst = tokens * ranks_of_domain * domains
    near = 2 * worst * (row + probabilities)
    far = 2 * tokens * (domains - 1) * (row + probabilities)
    return near + far
