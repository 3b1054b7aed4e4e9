"""Speed of dispatch and combine, launch by launch and as pairs, next to a plain copy and to a matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from moe_rt.buffer.buffer import Buffer
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, num_sms, torch_device
from moe_rt.lab.check.measuring import OPS, ROLES, TARGETS, CopyCeiling, Load, Timer
from moe_rt.lab.check.pairs import PairRank, Times, Turns, on_one_rank, times_of
from moe_rt.lab.check.steps import Check, Table
from moe_rt.lab.testing.rounds import WrongOutput

TARGET_GRAPH_US, TARGET_HOST_US = 25.0, 15.0


def add_overheads(check: Check) -> None:
    rows: list[list[Any]] = []
    with check.part("pair of 1 token in a graph"):
        us = _us(on_one_rank(check.device, 1, PairRank.replayed, check.seconds / 2))
        rows.append(["pair of 1 token in a graph", us, _verdict(us, TARGET_GRAPH_US)])
    with check.part("host time of an op"):
        for op, seconds in on_one_rank(check.device, 1, PairRank.host_seconds, check.seconds / 2).items():
            us = _us(seconds)
            rows.append([f"host time of {op}, eager", us, _verdict(us, TARGET_HOST_US)])
    check.add(Table("Overhead: T = 1", ["what", "us", "target"], rows, "a missed target is no failure"))
    check.say("; ".join(f"{what} {us:g} us" for what, us, _ in rows))


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


RUNS, QUICK_RUNS = 20, 5


def check(check: Check) -> None:
    device, runs = check.device, QUICK_RUNS if check.quick else RUNS
    ceiling = CopyCeiling(torch_device(device))
    tokens = 1024 if check.quick else 4096
    for ranks in check.sizes or (1, 8):
        with check.part(f"{ranks} ranks"):
            load = Load(ranks, tokens)
            add_measured(check, load, times_of(device, load, runs, check.seconds / 3, profiled=True), ceiling)
            torch.cuda.empty_cache()
    add_overheads(check)
    add_loads(check, runs)
    add_overlap(check, runs)


def add_loads(check: Check, runs: int) -> None:
    """Time ops by events only: slightly fewer and more tokens than blocks, few blocks, and capacity that raises."""
    rows: list[list[Any]] = []
    for name, load in loads(check.device).items():
        with check.part(name):
            found = times_of(check.device, load, runs, check.seconds / 3)
            rates = [sum(found.num_bytes[part] for part in OPS[op]) / found.ops[op] / 1e9 for op in OPS]
            figures = [*(found.ops[op] * 1e6 for op in OPS), *rates]
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


def of_roles(launches: dict[str, Turns]) -> dict[str, float]:
    """Median seconds by launch, over all ranks together.

    A sending launch lasts from the first rank's start to the last one's end. A receiving launch first waits for every
    peer, so it counts from the end of the last sending launch.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for name in ROLES:
        if not launches.get(name):
            raise WrongOutput(f"the profiler: got no launch of {name}, expected some")
        spans[name] = [(min(begin for begin, _ in turn), max(end for _, end in turn)) for turn in launches[name]]
    for send, receive in OPS.values():
        after = zip(spans[send], spans[receive], strict=True)
        spans[receive] = [(max(sent[1], begin), end) for sent, (begin, end) in after]
    return {name: statistics.median(end - begin for begin, end in found) / 1e6 for name, found in spans.items()}


def add_measured(check: Check, load: Load, measured: Times, ceiling: CopyCeiling) -> None:
    rows, launches = [], of_roles(measured.launches)
    for name, role in ROLES.items():
        rows.append(row(f"{name} ({role})", launches[name], measured.num_bytes[name], ceiling, TARGETS.get(name)))
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
