"""Times of ops, launches and replayed pairs from one token to a large batch, next to torch and to a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_rt.group.thread_ranks import torch_device
from moe_rt.lab.check import estimate, measuring
from moe_rt.lab.check.measuring import OPS, CopyCeiling, Load, Timer, count_pulled, fewest_bytes
from moe_rt.lab.check.pairs import Turns, times_of
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
            found = times_of(check.device, load, runs, check.seconds, profiled=True, replayed=True)
            for name, turns in found.launches.items():
                one, together = of_launch(turns)
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


def of_launch(turns: Turns) -> tuple[float, float]:
    """Return the median seconds of a launch: one rank's, and from the first start to the last end."""
    one = statistics.median(end - begin for turn in turns for begin, end in turn)
    together = statistics.median(max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in turns)
    return one / 1e6, together / 1e6


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
