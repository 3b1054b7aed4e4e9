"""Times of ops, launches and replayed pairs from one token to a large batch, next to torch and to a copy."""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, torch_device
from moe_rt.lab.check import estimate, measuring
from moe_rt.lab.check.measuring import OPS, CopyCeiling, Load, StreamMeeting, Timer, count_pulled, fewest_bytes, kernels
from moe_rt.lab.check.scale import Drawn
from moe_rt.lab.check.steps import Check

# Ranks and tokens of each, the most telling first; H = 7168 and K = 8 as in DeepSeek-V3, E = 256.
SIZES = (
    *((1, 1), (1, 128), (1, 4096), (8, 128), (8, 4096), (8, 1), (1, 8), (1, 64), (1, 512), (8, 8), (8, 64), (8, 512)),
    *((2, 1), (2, 128), (2, 4096), (4, 1), (4, 128), (4, 4096), (1, 2), (1, 32), (1, 1024), (1, 2048)),
)
QUICK_SIZES = ((1, 1), (2, 8))
HIDDEN, TOPK, EXPERTS = 7168, 8, 256
WARM_UP, RUNS, QUICK_RUNS = 5, 20, 3
PAIRS_IN_GRAPH, REPLAYS, LOOPS = 4, 12, 5
_COLUMNS = ["ranks", "tokens", "dispatch", "combine", "pair in a graph", "torch", "copies", "estimate"]
_NOTE = (
    "us, medians; all ranks on one GPU, from the first start to the last end, cold cache. In a graph: one of many "
    "replayed pairs, warm. torch: sort, index_select, and a gather with a batched product, for all ranks' tokens. "
    "Copies: as many bytes as dispatch and combine must move. Estimate: `moe-rt docs cuda_estimates`, for one rank"
)


def check(check: Check) -> None:
    """Time each load. A row is saved as soon as it is known."""
    of_ops = check.begin(f"Loads: H = {HIDDEN}, K = {TOPK}, E = {EXPERTS}, bf16", _COLUMNS, _NOTE)
    columns = ["ranks", "tokens", "launch", "of one rank", "of all ranks"]
    of_launches = check.begin("Launches of these loads", columns, "us by the profiler, medians; waits are included")
    where, runs = torch_device(check.device), QUICK_RUNS if check.quick else RUNS
    ceiling = CopyCeiling(where)
    for ranks, tokens in QUICK_SIZES if check.quick else SIZES:
        if ranks not in (check.sizes or (1, 2, 4, 8)):
            continue
        with check.part(f"{ranks} ranks, {tokens} tokens"):
            load = Load(ranks, tokens, HIDDEN, TOPK, EXPERTS)
            found = times_of(check.device, load, runs, check.seconds)
            for name, (one, together) in found.launches.items():
                of_launches.append([ranks, tokens, name, _us(one), _us(together)])
            others = [_us(s) for s in (*found.ops.values(), found.replayed, *alternatives(where, load, runs, ceiling))]
            of_ops.append([ranks, tokens, *others, _estimated_us(load, where)])
            torch.cuda.empty_cache()
    check.say(f"{len(of_ops)} loads timed")


def _us(seconds: float) -> float:
    return float(f"{seconds * 1e6:.4g}")


def _estimated_us(load: Load, device: torch.device) -> float | str:
    """Estimate a pair of one rank; "" for several, since the formulas are for a GPU each, or for an unknown GPU."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
    machine = next((m for m in estimate.MACHINES if m.name in name), None)
    if load.ranks > 1 or machine is None:
        return ""
    sizes = estimate.Load(load.tokens, 1, load.topk, load.experts, load.hidden)
    return round(sum(estimate.op_us(op, sizes, machine) for op in OPS), 2)


@dataclass
class Times:
    """Seconds of each op, of one pair in a replayed graph, and of each launch: one rank's, and all ranks' together."""

    ops: dict[str, float]
    replayed: float
    launches: dict[str, tuple[float, float]]


def times_of(device: Any, load: Load, runs: int, seconds: float) -> Times:
    """Time a load's ops by events, its launches by the profiler, and its pairs in a replayed graph."""
    from torch.profiler import ProfilerActivity, profile

    where = torch_device(device)
    drawn, shared = Drawn.of(load, 1, where), _Shared(load.ranks, seconds)
    if where.type == "cuda":  # ranks have their own streams
        torch.cuda.synchronize(where)
    profilers: list[Any] = []

    def work(group: ThreadGroup) -> tuple[list[list[Any]], float]:
        rank = group.rank
        with Buffer(group, **load.buffer_kwargs()) as buffer, torch.no_grad():
            own = _Rank(buffer, shared, where, drawn.xs[rank], drawn.idx[rank], drawn.weights[rank])
            points = own.timed_pairs(WARM_UP + runs)
            own.meet()
            if rank == 0:
                profilers.append(profile(activities=[ProfilerActivity.CUDA]))
                profilers[0].__enter__()
            own.meet()
            own.timed_pairs(WARM_UP + runs)
            own.meet()
            if rank == 0:
                profilers[0].__exit__(None, None, None)
            own.meet()
            replayed = own.replayed()
            buffer.check()
            return points, replayed

    found = ThreadRanks(load.ranks, device, reserve_bytes=5 * load.capacity_bytes()).run(work, seconds=seconds)
    launches = launch_times(kernels(profilers[0].events()), load.ranks)
    return Times(_spans([points for points, _ in found]), max(s for _, s in found), launches)


class _Shared:
    """Barriers of one load's ranks, and the lock for capturing: torch captures one graph at a time."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds
        self.streams, self.hosts = StreamMeeting(size, seconds), threading.Barrier(size)
        self.capturing = threading.Lock()


class _Rank:
    """One rank's pairs, on its own stream."""

    def __init__(
        self, buffer: Buffer, shared: _Shared, device: torch.device, x: Tensor, idx: Tensor, weights: Tensor
    ) -> None:
        self.buffer, self.shared, self.device = buffer, shared, device
        self.inputs = x, idx, weights
        self.stream = torch.cuda.current_stream(device)

    def meet(self) -> None:
        """Wait for this rank's stream, then for all hosts."""
        self.stream.synchronize()
        self.shared.hosts.wait(self.shared.seconds)

    def timed_pairs(self, count: int) -> list[list[Any]]:
        """Run pairs with a cold cache; return the events before and after each op."""
        flush = measuring.Flush(self.device, (1 << 30) // self.shared.size)
        points = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(count)]
        for point in points:
            flush.run()
            self._gate()
            point[0].record()
            received = self.buffer.dispatch(*self.inputs)
            point[1].record()
            self._gate()
            point[2].record()
            self.buffer.combine(*received)
            point[3].record()
        self.stream.synchronize()
        return points

    def _gate(self) -> None:
        measuring.hold(self.shared.size)
        self.shared.streams.wait()

    def replayed(self) -> float:
        """Return the seconds of one pair among many in a graph; every rank replays its own."""
        for _ in range(PAIRS_IN_GRAPH):
            self.buffer.combine(*self.buffer.dispatch(*self.inputs))
        self.meet()
        graph = torch.cuda.CUDAGraph()
        mode = "global" if self.shared.size == 1 else "thread_local"
        with self.shared.capturing:
            gc.collect()  # destroying objects during capture would be captured
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode):
                for _ in range(PAIRS_IN_GRAPH):
                    self.buffer.combine(*self.buffer.dispatch(*self.inputs))
        timers = [Timer() for _ in range(LOOPS)]
        for timer in timers:
            self.meet()
            graph.replay()
            timer.start()
            for _ in range(REPLAYS):
                graph.replay()
            timer.stop()
        self.meet()
        graph.reset()
        return statistics.median(timer.seconds() for timer in timers) / (REPLAYS * PAIRS_IN_GRAPH)


def _spans(points: list[list[list[Any]]]) -> dict[str, float]:
    """Return the median seconds of each op from the first rank's start to the last one's end; `points` by rank."""
    origin = points[0][WARM_UP - 1][0]
    found: dict[str, list[float]] = {op: [] for op in OPS}
    for turn in range(WARM_UP, len(points[0])):
        at = [[origin.elapsed_time(event) / 1e3 for event in rank[turn]] for rank in points]
        for number, times in enumerate(found.values()):
            times.append(max(a[2 * number + 1] for a in at) - min(a[2 * number] for a in at))
    return {op: statistics.median(times) for op, times in found.items()}


def launch_times(events: list[Any], size: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each of moe_rt's launches: one rank's, and from the first start to the last end."""
    found = {}
    for name in sorted({e.name for e in events if e.name.startswith(tuple(f"{op}_" for op in OPS))}):
        spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == name)
        rounds = [spans[i : i + size] for i in range(0, len(spans) - size + 1, size)][WARM_UP:]
        one = statistics.median(end - begin for r in rounds for begin, end in r)
        together = statistics.median(max(end for _, end in r) - min(begin for begin, _ in r) for r in rounds)
        found[name] = one / 1e6, together / 1e6
    return found


def alternatives(device: torch.device, load: Load, runs: int, ceiling: CopyCeiling) -> tuple[float, float]:
    """Return the seconds in which torch permutes and returns all ranks' tokens on the GPU, and those of copies of the
    fewest bytes that dispatch and combine move."""
    drawn = Drawn.of(load, 1, device)
    x, idx, weights = torch.cat(drawn.xs), torch.cat(drawn.idx), torch.cat(drawn.weights)
    n, flush = len(x), measuring.Flush(device)

    def order() -> tuple[Tensor, Tensor]:
        found = idx.flatten().sort(stable=True).indices
        return found, torch.empty_like(found).scatter_(0, found, torch.arange(len(found), device=device))

    permuted, back = order()
    rows = x.index_select(0, permuted // load.topk)

    def weigh() -> Tensor:
        factors = weights[:, None].to(x.dtype)
        return torch.bmm(factors, rows.index_select(0, back).view(n, load.topk, load.hidden))

    calls: tuple[Callable[[], Any], ...] = (order, lambda: x.index_select(0, permuted // load.topk), weigh)
    total = 0.0
    for call in calls:
        timers = [Timer() for _ in range(WARM_UP + runs)]
        for timer in timers:
            flush.run()
            timer.start()
            call()
            timer.stop()
        torch.cuda.synchronize(device)
        total += statistics.median(timer.seconds() for timer in timers[WARM_UP:])
    pulled = sum(count_pulled(own, load.experts, load.ranks) for own in drawn.idx)
    num_bytes = fewest_bytes(n, pulled, n * load.topk, load.hidden * x.itemsize)
    by_op = [sum(num_bytes[part] for part in parts) for parts in OPS.values()]
    return total, sum(number / ceiling.of(number) for number in by_op)
