"""Speed of dispatch and combine, launch by launch and as pairs, next to a plain copy and to a matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, num_sms, torch_device
from moe_rt.lab.check.measuring import (
    OPS,
    ROLES,
    TARGETS,
    CopyCeiling,
    Flush,
    Load,
    StreamMeeting,
    Timer,
    count_pulled,
    fewest_bytes,
    hold,
    kernels,
)
from moe_rt.lab.check.steps import Check, Table
from moe_rt.lab.testing.rounds import WrongOutput

PAIR_TOKENS = (1, 8, 64, 512, 1024, 4096, 8192)
HIDDEN, TOPK, EXPERTS = 7168, 8, 64
PAIR_WARM_UP, REPLAYS, OPS_IN_A_ROW, LOOPS = 5, 50, 200, 5
TARGET_GRAPH_US, TARGET_HOST_US = 25.0, 15.0


def add_latency(check: Check, runs: int) -> None:
    rows: list[list[Any]] = []
    for tokens in PAIR_TOKENS[:4] if check.quick else PAIR_TOKENS:
        with check.part(f"pair of {tokens} tokens"):
            rows.append([tokens, _us(on_one_rank(check, tokens, lambda work: work.pair_seconds(runs)))])
    title = f"Pair: R = 1, H = {HIDDEN}, K = {TOPK}, E = {EXPERTS}, bf16"
    check.add(Table(title, ["tokens", "us"], rows, "dispatch and combine by events, with a cold cache, medians"))
    overheads: list[list[Any]] = []
    with check.part("pair of 1 token in a graph"):
        us = _us(on_one_rank(check, 1, lambda work: work.replay_seconds(runs)))
        overheads.append(["pair of 1 token in a graph", us, _verdict(us, TARGET_GRAPH_US)])
    with check.part("host time of an op"):
        for op, seconds in on_one_rank(check, 1, lambda work: work.host_seconds()).items():
            us = _us(seconds)
            overheads.append([f"host time of {op}, eager", us, _verdict(us, TARGET_HOST_US)])
    check.add(Table("Overhead: T = 1", ["what", "us", "target"], overheads, "a missed target is no failure"))
    check.say("; ".join(f"{what} {us:g} us" for what, us, _ in overheads))


def on_one_rank(check: Check, tokens: int, measure: Any) -> Any:
    """Return the result of `measure` on a rank's Pair."""

    def work(group: ThreadGroup) -> Any:
        buffer = Buffer(
            group,
            num_max_tokens_per_rank=tokens,
            hidden=HIDDEN,
            num_topk=TOPK,
            num_experts=EXPERTS,
            dtype=torch.bfloat16,
            timeout_s=20.0,
        )
        with buffer, torch.no_grad():
            result = measure(Pair(buffer, torch_device(check.device)))
            buffer.check()
            return result

    (result,) = ThreadRanks(1, check.device).run(work, seconds=check.seconds / 2)
    return result


class Pair:
    """Dispatch and combine of a full buffer on the current stream."""

    def __init__(self, buffer: Buffer, device: torch.device) -> None:
        tokens = buffer.spec.num_max_tokens_per_rank
        self.buffer, self.device = buffer, device
        self.xs = [torch.randn(tokens, HIDDEN, device=device).bfloat16() for _ in range(2)]
        self.weights, self.idx = torch.rand(tokens, EXPERTS, device=device).topk(TOPK)

    def run(self, turn: int = 0) -> Tensor:
        return self.buffer.combine(*self.buffer.dispatch(self.xs[turn % 2], self.idx, self.weights))

    def pair_seconds(self, runs: int) -> float:
        """Device time of a pair: the host issues the pair while the cache is being flushed."""
        flush, timers = Flush(self.device), [Timer() for _ in range(PAIR_WARM_UP + runs)]
        for turn, timer in enumerate(timers):
            flush.run()
            flush.run()
            timer.start()
            self.run(turn)
            timer.stop()
        torch.cuda.current_stream(self.device).synchronize()
        return statistics.median(timer.seconds() for timer in timers[PAIR_WARM_UP:])

    def replay_seconds(self, runs: int) -> float:
        """Time of one replay among many in a row."""
        stream = torch.cuda.current_stream(self.device)
        for turn in range(PAIR_WARM_UP):
            self.run(turn)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.run()
        timers = [Timer() for _ in range(PAIR_WARM_UP + runs)]
        for timer in timers:
            timer.start()
            for _ in range(REPLAYS):
                graph.replay()
            timer.stop()
        stream.synchronize()
        seconds = statistics.median(timer.seconds() for timer in timers[PAIR_WARM_UP:]) / REPLAYS
        graph.reset()
        return seconds

    def host_seconds(self) -> dict[str, float]:
        """Time from call to return of one op among many in a row, while the device keeps up or the queue accepts
        them."""
        stream = torch.cuda.current_stream(self.device)
        recv_x, recv_weights, handle = self.buffer.dispatch(self.xs[0], self.idx, self.weights)
        calls = {
            "dispatch": lambda: self.buffer.dispatch(self.xs[0], self.idx, self.weights),
            "combine": lambda: self.buffer.combine(recv_x, recv_weights, handle),
        }
        found = {}
        for op, call in calls.items():
            times = []
            for _ in range(1 + LOOPS):
                stream.synchronize()
                begin = time.perf_counter()
                for _ in range(OPS_IN_A_ROW):
                    call()
                times.append((time.perf_counter() - begin) / OPS_IN_A_ROW)
            found[op] = statistics.median(times[1:])
        stream.synchronize()
        return found


def _us(seconds: float) -> float:
    return float(f"{seconds * 1e6:.4g}")


def _verdict(us: float, target: float) -> str:
    return f"{'met' if us < target else 'missed'} (< {target:g})"


BLOCKS = (8, 24)
OVERLAP_TOKENS, SIDE = 4096, 8192  # tokens of the pair, side of the square matrices
OVERLAP_WARM_UP = 3


def add_overlap(check: Check, runs: int) -> None:
    rows: list[list[Any]] = []
    for blocks in BLOCKS:
        if blocks > num_sms(check.device):
            continue
        with check.part(f"overlap on {blocks} blocks"):
            alone, product, both = (
                float(f"{s * 1e6:.4g}") for s in overlap_seconds(check.device, blocks, runs, check.seconds / 4)
            )
            hidden = (alone + product - both) / min(alone, product)
            rows.append([blocks, alone, product, both, float(f"{hidden:.2f}")])
    columns = ["blocks", "pair us", "product us", "both us", "hidden"]
    sizes = f"{OVERLAP_TOKENS} tokens, R = 1; product of two {SIDE} x {SIDE} in bf16"
    note = f"{sizes}; hidden: of the shorter, 1 is all of it"
    check.add(Table("Overlap with a product", columns, rows, note))
    if rows:
        check.say("; ".join(f"on {row[0]} blocks {row[4]:g} hidden" for row in rows))


def overlap_seconds(device: Any, blocks: int, runs: int, seconds: float) -> tuple[float, float, float]:
    """Seconds of a pair, of a product, and of both concurrently on separate streams."""

    def work(group: ThreadGroup) -> tuple[float, float, float]:
        where, load = torch_device(device), Load(1, OVERLAP_TOKENS, num_sms=blocks)
        x = torch.randn(load.tokens, load.hidden, device=where).bfloat16()
        weights, idx = torch.rand(load.tokens, load.experts, device=where).topk(load.topk)
        a, b = (torch.randn(SIDE, SIDE, device=where).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        with Buffer(group, **load.buffer_kwargs()) as buffer, torch.no_grad():
            side_stream = torch.cuda.Stream(where)

            def pair() -> None:
                buffer.combine(*buffer.dispatch(x, idx, weights))

            def product() -> None:
                torch.matmul(a, b, out=out)

            def both() -> None:
                main = torch.cuda.current_stream(where)
                side_stream.wait_stream(main)
                with torch.cuda.stream(side_stream):
                    product()
                pair()
                main.wait_stream(side_stream)

            of_pair, of_product, together = (_median(call, where, runs) for call in (pair, product, both))
            buffer.check()
        return of_pair, of_product, together

    (found,) = ThreadRanks(1, device, reserve_bytes=5 * Load(1, OVERLAP_TOKENS).capacity_bytes()).run(
        work, seconds=seconds
    )
    return found


def _median(call: Callable[[], None], device: torch.device, runs: int) -> float:
    timers = [Timer() for _ in range(OVERLAP_WARM_UP + runs)]
    for timer in timers:
        timer.start()
        call()
        timer.stop()
    torch.cuda.current_stream(device).synchronize()
    return statistics.median(timer.seconds() for timer in timers[OVERLAP_WARM_UP:])


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
        with check.part(name):
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
                hold(size)
                meeting.wait()
                point[0].record()
                recv_x, recv_weights, handle = buffer.dispatch(xs[turn % 2], idx, weights)
                point[1].record()
                hold(size)
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
