"""Lower bound on the time of each launch, by formula: bytes moved, loads in flight, and peers waited for.

Nothing here is measured. A launch takes its start-up, then its dependent steps one after the other, each as long as a
load from memory or from a peer, and then the time that its rows need. Rows are limited by the links, by memory, or by
the loads that lanes have in flight, whose number is read from machine code (code_limits.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_rt import _engine
from moe_rt.config.codec import Codec
from moe_rt.config.tuning import Tuning
from moe_rt.lab.check.code_limits import LIMITS
from moe_rt.plan.distinct import distinct
from moe_rt.plan.systems import gpu_of

WARP, INDEX_BYTES, THREADS = 32, 8, Tuning.threads
LAUNCH_S = 2e-6  # from the end of one kernel of a stream to the first load of the next
# Routing (cuda/protocol/flat/routing_tiles.h): instructions of a warp per 32 entries that it writes; instructions of an
# SM per cycle.
WRITING, PER_CYCLE = 300, 2
SM_BYTES = 64  # that a multiprocessor reads and writes per cycle


@dataclass(frozen=True)
class Machine:
    """Assumed properties of a kind of GPU: bytes per second, seconds, and its clock in Hz."""

    name: str
    sms: int
    memory: float
    link: float  # one direction, all links to peers together, as achieved by copies
    from_memory_s: float  # latency of a load that misses every cache
    from_peer_s: float
    clock: float
    arch: str


def _machine(name: str, link: float, from_memory_s: float, from_peer_s: float, clock: float, arch: str) -> Machine:
    gpu = gpu_of(name)
    return Machine(name, gpu.sms, 1e9 * gpu.memory_gbs, link, from_memory_s, from_peer_s, clock, arch)


# SMs and memory: the planner's data sheets. Links: rates that kernels were seen to reach, 340 to 370 GB/s of 450 on
# Hopper and 726 to 753 of 900 on Blackwell. A load from a peer: 1.5 to 2 us on Hopper; Blackwell is assumed to take as
# long.
MACHINES = (
    _machine("H100", 355e9, 0.65e-6, 1.75e-6, 1.7e9, "sm_90a"),
    _machine("H200", 355e9, 0.65e-6, 1.75e-6, 1.7e9, "sm_90a"),
    _machine("B200", 735e9, 0.75e-6, 1.75e-6, 1.8e9, "sm_100a"),
)


@dataclass(frozen=True)
class Load:
    """Sizes of one op on one of `ranks` ranks with a GPU each. Experts are drawn uniformly.

    Attributes:
        row: bytes of a row in memory.
        wire: bytes of a row as dispatch transmits it.
    """

    tokens: int
    ranks: int = 8
    topk: int = 8
    experts: int = 256
    hidden: int = 7168
    elem: int = 2
    coded: bool = False

    @property
    def row(self) -> int:
        return self.hidden * self.elem

    @property
    def wire(self) -> int:
        return self.hidden + 4 * math.ceil(self.hidden / 128) if self.coded else self.row

    @property
    def ranks_of_a_token(self) -> float:
        """Mean number of distinct ranks that hold a token's experts."""
        return distinct(self.ranks, self.experts, self.topk)

    @property
    def pulled(self) -> float:
        """Number of (token, rank) pairs that a rank receives, and sends."""
        return self.tokens * self.ranks_of_a_token

    @property
    def copies(self) -> int:
        """Number of rows of recv_x."""
        return self.tokens * self.topk

    @property
    def away(self) -> float:
        """Share of rows that cross a link."""
        return 1 - 1 / self.ranks


@dataclass(frozen=True)
class Rows:
    """Rows that a launch works through.

    Attributes:
        number: number of rows, each taken by a warp or a block.
        load_bytes: bytes of one row, from each of its sources.
        sources: number of loads that are added up at one place.
        remote: True if the sources are on peers.
        link_bytes, memory_bytes, fewest_bytes: bytes of all rows. The last counts only the memory and link bytes that
            every implementation of the op must move.
    """

    number: float
    load_bytes: int
    sources: float
    remote: bool
    link_bytes: float
    memory_bytes: float
    fewest_bytes: float


@dataclass(frozen=True)
class Steps:
    """Latencies that a launch waits for before its rows flow, one after the other; counted by hand in the sources.

    Attributes:
        memory: dependent loads from memory, and atomics; loads named together are issued together.
        peers: dependent loads from peers, or writes that must have arrived there.
        routing: further loads from memory that building the lists waits for; None if the launch builds no lists.
    """

    memory: tuple[str, ...]
    peers: tuple[str, ...]
    routing: int | None = None


_COUNTED = ("the count of blocks", "a bad entry")
_HEARD = ("a mailbox", "its header")
STEPS = {
    "dispatch_send": Steps(("state", "ids", "places", "weights", *_COUNTED), ("the signal",), routing=3),
    # The row's own load is counted with the rows.
    "dispatch_receive": Steps(_HEARD, ("counts", "a pull", "its copies")),
    "combine_send": Steps(("state and head of the plan", "a pull", "its rows", *_COUNTED), ("partials", "the signal")),
    "combine_receive": Steps((*_HEARD, "the send plan"), ()),
    "combine_backward_send": Steps(("state and head of the plan", *_COUNTED), ("the signal",)),
    # The load of the peer's row is counted with the rows.
    "combine_backward_receive": Steps((*_HEARD, "a pull", "its rows"), ()),
    # Lists are built from copies in shared memory and written to the receiver.
    "dispatch_whole": Steps(
        ("state, ids, weights, places and peers", *_HEARD, "counts", "a pull", "its copies"),
        ("rows and lists", "the signal"),
        routing=0,
    ),
    "combine_whole": Steps(
        ("state, head of the plan and send plan", "a pull", "its rows", *_HEARD), ("partials", "the signal")
    ),
}
# Small batches: the sender writes the lists to the receiver.
PUSHED_STEPS = {
    "dispatch_send": Steps(
        ("state", "ids", "places", "weights and peers", "places of counts", *_COUNTED),
        ("rows and lists", "the signal"),
        routing=3,
    ),
    "dispatch_receive": Steps((*_HEARD, "counts", "a pull", "its copies"), ()),
}
OPS = {
    "dispatch": ("dispatch_send", "dispatch_receive"),
    "combine": ("combine_send", "combine_receive"),
    "combine backward": ("combine_backward_send", "combine_backward_receive"),
}
# One launch replaces both in a buffer for very few tokens.
WHOLE_OPS = {"dispatch_whole": OPS["dispatch"], "combine_whole": OPS["combine"]}
# DeepEP on eight H200, in us, as published: 1 and 128 tokens by its low-latency kernels, 4096 by its normal ones.
TARGETS_US = {("dispatch", 1): 11.9, ("dispatch", 128): 35.1, ("dispatch", 4096): 501.9}
TARGETS_US |= {("combine", 1): 12.6, ("combine", 128): 67.8, ("combine", 4096): 979.2}


def rows_of(kernel: str, load: Load) -> Rows:
    """Rows of one launch of the mapped kernels. Gradients are not encoded."""
    tokens, pulled, copies, away = load.tokens, load.pulled, load.copies, load.away
    backward = kernel.startswith("combine_backward")
    pushed = not backward and tokens <= Tuning.pushed_rows
    wire = load.row if backward else load.wire
    lists = 16 * pulled + 20 * copies
    taken = pulled * wire
    if kernel in ("dispatch_send", "combine_backward_send"):
        sent = taken if pushed else tokens * wire
        moved: float = tokens * load.row + sent
        extra = 0.0 if backward else INDEX_BYTES * copies + lists
        return Rows(tokens, load.row, 1, False, away * (taken + lists) if pushed else 0, moved + extra, moved)
    if kernel == "dispatch_receive":
        written = copies * load.row
        link_bytes = 0 if pushed else away * (taken + lists)
        return Rows(pulled, wire, 1, not pushed, link_bytes, written + taken + lists, taken + written)
    if kernel == "combine_send":
        read, sent = copies * load.row, pulled * load.row
        return Rows(pulled, load.row, copies / pulled, False, away * sent, read + sent, read + sent)
    if kernel == "combine_receive":
        moved = (pulled + tokens) * load.row
        return Rows(tokens, load.row, load.ranks_of_a_token, False, 0, moved, moved)
    own = 2 * copies * load.row
    return Rows(pulled, load.row, 1, True, away * taken, taken + own, taken + own)


@dataclass(frozen=True)
class Estimate:
    """Estimate of one launch, in seconds. `bytes_per_sm` are in flight while rows flow; `rows` has one entry per
    half."""

    seconds: float
    steps_s: float
    rows_s: float
    bytes_per_sm: int
    rows: tuple[Rows, ...]

    @property
    def memory_bytes(self) -> float:
        return sum(rows.memory_bytes for rows in self.rows)

    @property
    def link_bytes(self) -> float:
        return sum(rows.link_bytes for rows in self.rows)

    @property
    def fewest_bytes(self) -> float:
        return sum(rows.fewest_bytes for rows in self.rows)


def launches_of(op: str, load: Load) -> tuple[str, ...]:
    """Launches of an op that move rows, in a buffer whose maximum is the load's token count."""
    whole = [kernel for kernel, halves in WHOLE_OPS.items() if halves == OPS[op]]
    return (whole[0],) if whole and load.tokens <= _engine.WHOLE_TOKENS else OPS[op]


def steps_of(kernel: str, load: Load) -> Steps:
    """Steps that a launch waits for, in a buffer whose maximum is the load's token count."""
    pushed = PUSHED_STEPS if load.tokens <= Tuning.pushed_tokens else {}
    return pushed.get(kernel, STEPS[kernel])


def warps_together(num_rows: float, blocks: int) -> int:
    """Number of warps that share a row (cuda/gpu/ops.h)."""
    warps = THREADS // WARP
    while warps > 1 and num_rows > blocks * (THREADS // WARP // warps):
        warps //= 2
    return warps


def moving_s(rows: Rows, machine: Machine, blocks: int, loads: tuple[int, int], together: int) -> float:
    """Time for which rows flow. `loads` is the width of a lane's loads and how many of them are in flight."""
    width, ahead = loads
    latency = machine.from_peer_s if rows.remote else machine.from_memory_s
    groups = blocks * (THREADS // WARP // together)
    places = math.ceil(rows.load_bytes / (width * WARP * together))  # loads of a lane per row
    serial_s = math.ceil(rows.number / groups) * math.ceil(places * rows.sources / ahead) * latency
    by_blocks = rows.memory_bytes / (blocks * SM_BYTES * machine.clock)
    return max(serial_s, rows.link_bytes / machine.link, rows.memory_bytes / machine.memory, by_blocks)


def estimate(kernel: str, load: Load, machine: Machine, num_sms: int | None = None) -> Estimate:
    """Estimate one launch on an idle GPU, with at most num_sms blocks whose lanes move rows."""
    steps = steps_of(kernel, load)
    width, ahead = LIMITS[machine.arch][Codec.FP8 if load.coded else Codec.RAW][
        kernel
    ].load  # limits that machine code is held to
    blocks = 1 if kernel in WHOLE_OPS else min(machine.sms, num_sms or machine.sms)
    halves = tuple(rows_of(half, load) for half in WHOLE_OPS.get(kernel, (kernel,)))
    flow_s = 0.0
    for rows in halves:
        together = 1 if kernel == "combine_backward_receive" else warps_together(rows.number, blocks)
        flow_s += moving_s(rows, machine, blocks, (width, ahead), together)
    steps_s = len(steps.memory) * machine.from_memory_s + len(steps.peers) * machine.from_peer_s
    if steps.routing is not None:
        making_s = routing_s(load, machine, blocks, steps.routing)
        flow_s = flow_s + making_s if kernel in WHOLE_OPS else max(flow_s, making_s)  # by one block, or by others
    if kernel.endswith("_receive") and load.tokens >= Tuning.wait_apart_tokens:
        steps_s += LAUNCH_S + machine.from_memory_s  # the separate launch that waits
    return Estimate(LAUNCH_S + steps_s + flow_s, steps_s, flow_s, THREADS * width * ahead, halves)


def routing_s(load: Load, machine: Machine, blocks: int, waits: int) -> float:
    """Time of the block that routes most. It counts all tokens except one tile's, and writes its own tiles."""
    tile = _engine.ENTRIES_PER_LANE * THREADS // load.topk
    tiles = math.ceil(load.tokens / tile)
    own = math.ceil(tiles / min(tiles, max(1, blocks // _engine.BLOCKS_PER_ROUTER)))
    counting = 12 * load.topk + 2 * load.topk * (load.topk - 1) + 2 * load.topk  # instructions per token
    counted = max(0, load.tokens - tile) / WARP * counting
    written = min(load.tokens, own * tile) * load.topk / WARP * WRITING
    return (counted + written) / (PER_CYCLE * machine.clock) + waits * machine.from_memory_s


def op_us(op: str, load: Load, machine: Machine) -> float:
    """Time of all launches of an op, in us."""
    return 1e6 * sum(estimate(kernel, load, machine).seconds for kernel in launches_of(op, load))
