"""Times dispatches and combines of virtual ranks: ops by events, launches by the profiler, pairs in replayed graphs."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, torch_device
from moe_rt.lab.check import measuring
from moe_rt.lab.check.measuring import OPS, Load, Timer, count_pulled, fewest_bytes, kernels
from moe_rt.lab.check.scale import Drawn
from moe_rt.lab.testing.rounds import WrongOutput, read
from moe_rt.lab.testing.streams import StreamGate

WARM_UP = 5
PAIRS_IN_GRAPH, REPLAYS, LOOPS = 4, 12, 5
OPS_IN_A_ROW = 200
_Received: TypeAlias = tuple[Tensor, Tensor, Handle]
# Begin and end of one launch on every rank, by turn, in us of the profiler's clock.
Turns: TypeAlias = list[list[tuple[float, float]]]


@dataclass
class Times:
    """Times and sizes of one load.

    Attributes:
        ops: median seconds of each op, from the first rank's start to the last one's end.
        launches: every launch by name, if the profiler was asked for.
        replayed: seconds of one pair among many in a replayed graph, 0 if not asked for.
        num_bytes: fewest bytes of each launch, of all ranks together.
    """

    ops: dict[str, float]
    launches: dict[str, Turns]
    replayed: float
    num_bytes: dict[str, int]


def times_of(
    device: Any, load: Load, runs: int, seconds: float, *, profiled: bool = False, replayed: bool = False
) -> Times:
    """Time a load's ops by events; if `profiled` also its launches, if `replayed` its pairs in a graph.

    Raises:
        WrongOutput: rows were dropped, so that fewer bytes were moved.
    """
    where = torch_device(device)
    drawn, shared = Drawn.of(load, 1, where), _Shared(load.ranks, seconds)
    if where.type == "cuda":  # ranks have their own streams
        torch.cuda.synchronize(where)
    profiler = _Profiler()

    def work(group: ThreadGroup) -> tuple[list[list[Any]], int, float]:
        rank = group.rank
        with Buffer(group, **load.buffer_kwargs()) as buffer, torch.no_grad():
            own = PairRank(buffer, shared, where, drawn.xs[rank], drawn.idx[rank], drawn.weights[rank])
            points, handle = own.timed_pairs(WARM_UP + runs)
            if dropped := int(read(handle.num_dropped)):
                raise WrongOutput(f"rank {rank}: got {dropped} dropped rows, expected capacity for all")
            kept = int(read(handle.offs[-1]))
            if profiled:
                own.meet(profiler.start)
                own.timed_pairs(WARM_UP + runs)
                own.meet(profiler.stop)
            in_graph = own.replayed() if replayed else 0.0
            buffer.check()
            return points, kept, in_graph

    # Memory for the inputs and for the outputs of two ops.
    found = ThreadRanks(load.ranks, device, reserve_bytes=5 * load.capacity_bytes()).run(work, seconds=seconds)
    pulled = sum(count_pulled(idx, load.experts, load.ranks) for idx in drawn.idx)
    num_bytes = fewest_bytes(load.ranks * load.tokens, pulled, sum(kept for _, kept, _ in found), 2 * load.hidden)
    launches = launch_turns(profiler.events(), load.ranks) if profiled else {}
    return Times(_spans([points for points, _, _ in found]), launches, max(s for *_, s in found), num_bytes)


def on_one_rank(device: Any, tokens: int, measure: Callable[[PairRank], Any], seconds: float) -> Any:
    """Return the result of `measure` on the pairs of a single rank with this number of tokens."""
    load, where = Load(1, tokens), torch_device(device)

    def work(group: ThreadGroup) -> Any:
        drawn = Drawn.of(load, 1, where)
        with Buffer(group, **load.buffer_kwargs()) as buffer, torch.no_grad():
            own = PairRank(buffer, _Shared(1, seconds), where, drawn.xs[0], drawn.idx[0], drawn.weights[0])
            result = measure(own)
            buffer.check()
            return result

    return ThreadRanks(1, device).run(work, seconds=seconds)[0]


class _Shared:
    """Barriers of one load's ranks, and the lock for capturing: torch captures one graph at a time."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds
        self.gate, self.hosts = StreamGate(size, seconds), threading.Barrier(size)
        self.capturing = threading.Lock()


class _Profiler:
    """torch's profiler of the device, which is made on the rank that starts it."""

    def start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.__enter__()

    def stop(self) -> None:
        self._profile.__exit__(None, None, None)

    def events(self) -> list[Any]:
        return kernels(self._profile.events())


class PairRank:
    """One rank's pairs, on its own stream."""

    def __init__(
        self, buffer: Buffer, shared: _Shared, device: torch.device, x: Tensor, idx: Tensor, weights: Tensor
    ) -> None:
        self.buffer, self.shared, self.device = buffer, shared, device
        self.inputs = x, idx, weights
        self.stream = torch.cuda.current_stream(device)

    def meet(self, then: Callable[[], None] = lambda: None) -> None:
        """Wait for this rank's stream, then for all hosts. Let rank 0 call `then` before any host continues."""
        self.stream.synchronize()
        self.shared.hosts.wait(self.shared.seconds)
        if self.buffer.rank == 0:
            then()
        self.shared.hosts.wait(self.shared.seconds)

    def timed_pairs(self, count: int) -> tuple[list[list[Any]], Handle]:
        """Run pairs with a cold cache; return the events before and after each op, and the last handle."""
        flush = measuring.Flush(self.device, (1 << 30) // self.shared.size)
        points = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(count)]
        for point in points:
            flush.run()
            self.shared.gate.wait()
            point[0].record()
            received: _Received = self.buffer.dispatch(*self.inputs)
            point[1].record()
            self.shared.gate.wait()
            point[2].record()
            self.buffer.combine(*received)
            point[3].record()
        self.stream.synchronize()
        return points, received[2]

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

    def host_seconds(self) -> dict[str, float]:
        """Time from call to return of one op among many in a row, while the device keeps up or the queue accepts
        them."""
        received: _Received = self.buffer.dispatch(*self.inputs)
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: self.buffer.dispatch(*self.inputs),
            "combine": lambda: self.buffer.combine(*received),
        }
        found = {}
        for op, call in calls.items():
            times = []
            for _ in range(1 + LOOPS):
                self.stream.synchronize()
                begin = time.perf_counter()
                for _ in range(OPS_IN_A_ROW):
                    call()
                times.append((time.perf_counter() - begin) / OPS_IN_A_ROW)
            found[op] = statistics.median(times[1:])
        self.stream.synchronize()
        return found


def _spans(points: list[list[list[Any]]]) -> dict[str, float]:
    """Return the median seconds of each op from the first rank's start to the last one's end; `points` by rank."""
    origin = points[0][WARM_UP - 1][0]  # before every turn that counts
    found: dict[str, list[float]] = {op: [] for op in OPS}
    for turn in range(WARM_UP, len(points[0])):
        at = [[origin.elapsed_time(event) / 1e3 for event in rank[turn]] for rank in points]
        for number, times in enumerate(found.values()):
            times.append(max(a[2 * number + 1] for a in at) - min(a[2 * number] for a in at))
    return {op: statistics.median(times) for op, times in found.items()}


def launch_turns(events: list[Any], size: int) -> dict[str, Turns]:
    """Return moe_rt's launches by name, without the turns that warm up.

    Raises:
        WrongOutput: the profiler has lost launches of some rank.
    """
    found = {}
    for name in sorted({e.name for e in events if e.name.startswith(tuple(f"{op}_" for op in OPS))}):
        spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == name)
        if len(spans) % size:
            raise WrongOutput(f"the profiler: got {len(spans)} launches of {name}, expected a multiple of {size}")
        found[name] = [spans[i : i + size] for i in range(0, len(spans), size)][WARM_UP:]
    return found
