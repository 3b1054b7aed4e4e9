"""Lower bound on the time of launches with few blocks, by formula: rows in registers, and rows that go through rings.

Only the flow of rows differs from estimate.py: a warp has the pieces of its ring in flight, across consecutive rows,
whereas lanes have their loads of one row.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from moe_rt import _engine
from moe_rt.config.options import BufferOptions
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.config.tuning import Tuning
from moe_rt.engine.gpu.launcher import RING_KERNELS, ring_for, under_way
from moe_rt.lab.check.estimate import (
    SM_BYTES,
    THREADS,
    WARP,
    Estimate,
    Load,
    Machine,
    Rows,
    estimate,
    routing_s,
    rows_of,
    steps_of,
    warps_together,
)

WARPS = THREADS // WARP
# Maximum shared memory of a block: NVIDIA's programming guide.
BULK_BYTES = {"sm_90a": 227 << 10, "sm_100a": 227 << 10, "sm_120a": 99 << 10}


@functools.cache
def ring_of(load: Load, arch: str) -> _engine.RingMemory:
    """Ring of a buffer for such a load, in bf16."""
    spec = BufferSpec.make(
        Topology.one_node(load.ranks),
        BufferOptions(),
        num_max_tokens_per_rank=load.tokens,
        hidden=load.hidden,
        num_topk=load.topk,
        num_experts=load.experts,
        dtype=torch.bfloat16,
    )
    scratch = _engine.scratch_bytes(spec.shape(pushes=True), list(spec.placement.ranks), 0, THREADS)
    ring = ring_for(spec, 1, scratch_bytes=scratch, bulk_bytes=BULK_BYTES[arch], warps=WARPS)
    assert ring is not None
    return ring


def moving_s(rows: Rows, machine: Machine, blocks: int, ring: _engine.RingMemory) -> float:
    """Time for which rows flow through rings."""
    latency = machine.from_peer_s if rows.remote else machine.from_memory_s
    together = warps_together(rows.number, blocks)
    groups = blocks * (WARPS // together)
    pieces = math.ceil(rows.number / groups) * math.ceil(
        math.ceil(rows.load_bytes / ring.piece) / together
    )  # pieces per warp
    by_ring = math.ceil(pieces / _engine.RING_LOADS) * latency
    by_blocks = rows.memory_bytes / (blocks * SM_BYTES * machine.clock)
    return max(by_ring, rows.link_bytes / machine.link, rows.memory_bytes / machine.memory, by_blocks)


def estimate_ring(kernel: str, load: Load, machine: Machine, num_sms: int) -> Estimate:
    """Estimate one launch with rings; the arguments are those of estimate()."""
    by_lanes = estimate(kernel, load, machine, num_sms)
    if kernel not in RING_KERNELS or load.coded:
        return by_lanes
    ring, blocks = ring_of(load, machine.arch), min(machine.sms, num_sms)
    flow_s = moving_s(rows_of(kernel, load), machine, blocks, ring)
    routing = steps_of(kernel, load).routing
    if routing is not None:
        flow_s = max(flow_s, routing_s(load, machine, blocks, routing))
    seconds = by_lanes.seconds - by_lanes.rows_s + flow_s
    return replace(by_lanes, seconds=seconds, rows_s=flow_s, bytes_per_sm=under_way(ring, WARPS))


def most_blocks(machine: Machine) -> int:
    """Maximum number of blocks for which lanes have less of peers' rows in flight than the links could deliver."""
    return int(machine.link * machine.from_peer_s / Tuning.ring_bytes)
