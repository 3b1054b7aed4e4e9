"""Speed of dispatch and combine, launch by launch, next to a plain copy of as many bytes on the same GPU."""

from __future__ import annotations

import statistics
import threading
from dataclasses import dataclass
from typing import Any

import torch

from moe_rt.comm.buffer import Buffer
from moe_rt.gpucheck.bandwidth import OPS, ROLES, TARGETS, CopyCeiling, Flush, count_pulled, fewest_bytes
from moe_rt.gpucheck.latency import add_latency
from moe_rt.gpucheck.load import Load
from moe_rt.gpucheck.overlap import add_overlap
from moe_rt.gpucheck.profiles import kernels
from moe_rt.gpucheck.steps import Check, Table
from moe_rt.gpucheck.switches import rings
from moe_rt.heap.rendezvous import ThreadGroup
from moe_rt.heap.thread_ranks import ThreadRanks, num_sms, torch_device
from moe_rt.testing.rounds import WrongOutput

WARM_UP, RUNS, QUICK_RUNS = 5, 20, 5


@dataclass
class Measured:
    """Seconds by op and by launch, and the fewest bytes by launch, over all ranks together."""

    ops: dict[str, float]
    launches: dict[str, float]
    num_bytes: dict[str, int]


def check(check: Check) -> None:
    device, runs = check.device, QUICK_RUNS if check.quick else RUNS
    ceiling = CopyCeiling(torch_device(device))
    tokens = 1024 if check.quick else 4096
    for ranks in check.sizes or (1, 8):
        with check.part(f"{ranks} ranks"):
            load = Load(ranks, tokens)
            add_measured(check, load, measure(device, load, runs, check.seconds / 3), ceiling)
            torch.cuda.empty_cache()
    add_latency(check, runs)
    add_loads(check, runs)
    add_overlap(check, runs)


def add_loads(check: Check, runs: int) -> None:
    """Time ops by events only: slightly fewer and more tokens than blocks, few blocks, and capacity that raises."""
    rows: list[list[Any]] = []
    for name, load in loads(check.device).items():
        with check.part(name), rings(on=load.rings):
            spans, num_bytes = run_pairs(check.device, load, runs, check.seconds / 3)
            rates = [sum(num_bytes[part] for part in OPS[op]) / spans[op] / 1e9 for op in OPS]
            figures = [*(spans[op] * 1e6 for op in OPS), *rates]
            rows.append([name, load.ranks, load.tokens, load.num_sms or "all", *(float(f"{f:.4g}") for f in figures)])
            torch.cuda.empty_cache()
    columns = ["what", "ranks", "tokens", "blocks", "dispatch us", "combine us", "dispatch GB/s", "combine GB/s"]
    check.add(
        Table("Other loads: bf16", columns, rows, "fewest bytes of all ranks together; medians of spans by events")
    )


def loads(device: Any) -> dict[str, Load]:
    """Loads to time. Speed must not drop sharply when a launch has slightly more rows than blocks."""
    few = {f"{tokens} tokens on 8 ranks": Load(8, tokens) for tokens in (128, 133)}
    counts = [n for n in (8, 24) if n <= num_sms(device)]
    narrow = {f"{n} blocks": Load(1, 4096, num_sms=n) for n in counts} | {"all blocks": Load(1, 4096)}
    narrow |= {f"{n} blocks, rows in registers": Load(1, 4096, num_sms=n, rings=False) for n in counts}
    return few | narrow | {"capacity that raises": Load(8, 4096, raises=True)}


def measure(device: Any, load: Load, runs: int, seconds: float) -> Measured:
    """Time the ops by events, and in a second run the launches by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    spans, num_bytes = run_pairs(device, load, runs, seconds)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_pairs(device, load, runs, seconds)
    return Measured(spans, launch_times(kernels(profiler.events()), load.ranks), num_bytes)


def run_pairs(device: Any, load: Load, runs: int, seconds: float) -> tuple[dict[str, float], dict[str, int]]:
    """Median span of each op from the first rank's start to the last rank's end, and the fewest bytes."""
    where, size = torch_device(device), load.ranks
    meeting = StreamMeeting(size, seconds)

    def work(group: ThreadGroup) -> tuple[list[list[Any]], int, int]:
        generator = torch.Generator(where).manual_seed(group.rank)
        xs = [torch.randn(load.tokens, load.hidden, generator=generator, device=where).bfloat16() for _ in range(2)]
        scores = torch.rand(load.tokens, load.experts, generator=generator, device=where)
        weights, idx = scores.topk(load.topk)
        flush = Flush(where, (1 << 30) // size)
        points = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(WARM_UP + runs)]
        with Buffer(group, **load.buffer_kwargs()) as buffer, torch.no_grad():
            for turn, point in enumerate(points):
                flush.run()
                meeting.wait()
                point[0].record()
                recv_x, recv_weights, handle = buffer.dispatch(xs[turn % 2], idx, weights)
                point[1].record()
                meeting.wait()
                point[2].record()
                buffer.combine(recv_x, recv_weights, handle)
                point[3].record()
            torch.cuda.current_stream(where).synchronize()
            buffer.check()
            if dropped := int(handle.num_dropped):
                raise WrongOutput(f"rank {group.rank}: got {dropped} dropped rows, expected capacity for all")
            return points[WARM_UP - 1 :], count_pulled(idx, load.experts, size), int(handle.offs[-1])

    # Memory for the inputs and for the outputs of two ops.
    results = ThreadRanks(size, device, reserve_bytes=5 * load.capacity_bytes()).run(work, seconds=seconds)
    spans: dict[str, list[float]] = {"dispatch": [], "combine": []}
    origin = results[0][0][0][0]  # recorded in the last warm-up turn, so before every turn that counts
    for turn in range(1, 1 + runs):
        at = [[origin.elapsed_time(event) / 1e3 for event in points[turn]] for points, _, _ in results]
        spans["dispatch"].append(max(a[1] for a in at) - min(a[0] for a in at))
        spans["combine"].append(max(a[3] for a in at) - min(a[2] for a in at))
    pulled, kept = sum(r[1] for r in results), sum(r[2] for r in results)
    num_bytes = fewest_bytes(size * load.tokens, pulled, kept, 2 * load.hidden)
    return {op: statistics.median(times) for op, times in spans.items()}, num_bytes


class StreamMeeting:
    """Barrier of streams: no rank's stream continues until all have arrived. Hosts wait for each other, not for the
    device."""

    def __init__(self, size: int, seconds: float) -> None:
        self._size, self._seconds = size, seconds
        self._barrier = threading.Barrier(size)
        self._events: list[list[Any]] = [[], []]
        self._here = threading.local()

    def wait(self) -> None:
        """Wait for all streams. Every rank must call this the same number of times."""
        if self._size == 1:
            return
        turn = self._here.turn = getattr(self._here, "turn", 0) + 1
        event = torch.cuda.Event()
        event.record()
        if self._barrier.wait(self._seconds) == 0:
            self._events[(turn + 1) % 2] = []  # the previous meeting's, which all ranks have left
        self._events[turn % 2].append(event)
        self._barrier.wait(self._seconds)
        for other in self._events[turn % 2]:
            other.wait()


def launch_times(events: list[Any], size: int) -> dict[str, float]:
    """Median seconds by launch, over all ranks together.

    A sending launch lasts from the first rank's start to the last one's end. A receiving launch first waits for every
    peer, so it counts from the end of the last sending launch.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for name in ROLES:
        found = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == name)
        if not found or len(found) % size:
            raise WrongOutput(f"the profiler: got {len(found)} launches of {name}, expected a multiple of {size}")
        rounds = [found[i : i + size] for i in range(0, len(found), size)][WARM_UP:]
        spans[name] = [(min(begin for begin, _ in r), max(end for _, end in r)) for r in rounds]
    for send, receive in OPS.values():
        after = zip(spans[send], spans[receive], strict=True)
        spans[receive] = [(max(sent[1], begin), end) for sent, (begin, end) in after]
    return {name: statistics.median(end - begin for begin, end in found) / 1e6 for name, found in spans.items()}


def add_measured(check: Check, load: Load, measured: Measured, ceiling: CopyCeiling) -> None:
    rows = []
    for name, role in ROLES.items():
        rows.append(
            row(f"{name} ({role})", measured.launches[name], measured.num_bytes[name], ceiling, TARGETS.get(name))
        )
    for op, parts in OPS.items():
        rows.append(row(op, measured.ops[op], sum(measured.num_bytes[part] for part in parts), ceiling, None))
    columns = ["what", "us", "MB", "GB/s", "copy GB/s", "share of copy", "target"]
    sizes = f"R = {load.ranks}, T = {load.tokens}, H = {load.hidden}, K = {load.topk}, E = {load.experts}"
    note = (
        "fewest bytes of all ranks together; launches by the profiler, ops by events; copy: as many bytes, read and "
        "written; rows just published may still be cached when they are gathered"
    )
    check.add(Table(f"Bandwidth: {sizes}, bf16", columns, rows, note))
    shares = ", ".join(f"{ROLES[name]} {rows[list(ROLES).index(name)][5]:.2f}" for name in TARGETS)
    check.say(f"{load.ranks} ranks: {shares} of a copy")


def row(name: str, seconds: float, num_bytes: int, ceiling: CopyCeiling, target: float | None) -> list[Any]:
    rate, limit = num_bytes / seconds, ceiling.of(num_bytes)
    verdict = "" if target is None else f"{'met' if rate / limit >= target else 'missed'} ({target:g})"
    figures = (seconds * 1e6, num_bytes / 1e6, rate / 1e9, limit / 1e9, rate / limit)
    return [name, *(float(f"{figure:.4g}") for figure in figures), verdict]
