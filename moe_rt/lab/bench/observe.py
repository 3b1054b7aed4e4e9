"""Breakdown of moe_rt's own time: the phases of its ops, waits per peer, and the overhead of Python.

Measured apart from the timed iterations, so that the instrumentation costs the contestant nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt.buffer.buffer import Buffer
from moe_rt.lab.bench.contestants.base import Step
from moe_rt.lab.bench.inputs import Inputs
from moe_rt.lab.bench.world import World

T = TypeVar("T")
ITERS = 15
FEW_TOKENS, LOOKS = 64, 8  # tokens of a dispatch that looks at a peer's lines, and looks at each peer
PHASES = {"dispatch": ("publish", "wait for rows", "gather"), "combine": ("push", "wait for partials", "reduce")}


class _Notes(defaultdict[str, list[Any]]):
    """Observations of one rank, by name, in nanoseconds."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(list)
        self._buffer = buffer

    def spans(self) -> list[int]:
        """Time of the engine in the last op: before the signal, waiting, after."""
        timings = self._buffer.timings()
        return [timings["before_ns"], timings["wait_ns"], timings["after_ns"]]

    def timed(self, op: str, call: Callable[[], T], mode: str) -> T:
        """Run one op of the buffer. Its time beyond the engine's own is Python and autograd."""
        start = perf_counter_ns()
        result = call()
        wall = perf_counter_ns() - start
        spans = self.spans()
        self[f"overhead {op} {mode}"].append(wall - sum(spans))
        if mode == "no_grad":
            for phase, span in zip(PHASES[op], spans, strict=True):
                self[phase].append(span)
            # Peers are polled in order, so arrivals increase; the increment of a peer is the time spent waiting for it.
            seen = self._buffer.timings()["arrival_ns"]
            self[f"per peer {op}"].append([late - early for early, late in zip([0, *seen], seen, strict=False)])
        return result


def observe_pair(world: World, buffer: Buffer, inputs: Sequence[Inputs], cold: bool) -> dict[str, Any]:
    """Observe isolated pairs with warm or cold caches; everything in microseconds.

    Returns:
        breakdown: phase -> median, mean over ranks.
        waits: op -> [rank][peer], mean time that `rank` waited for `peer` after the peers before it.
        line_latency_ns: [rank][peer], time to read a cache line that the peer has just written (`Buffer.timings`).
        overhead: op and mode -> median, mean over ranks, of the time that Python and autograd add to the engine's.
    """
    notes = _Notes(buffer)
    for i in range(ITERS):
        world.meet(cold)
        with torch.no_grad():
            _pair(notes, buffer, inputs[i % len(inputs)])
        world.meet(cold)
        with torch.enable_grad():
            _pair_with_gradients(notes, buffer, inputs[i % len(inputs)])
    ranks = [json.loads(text) for text in world.gather(json.dumps(notes))]
    lines = [json.loads(text) for text in world.gather(json.dumps(buffer.timings()["line_latency_ns"]))]
    mean = {name: fmean(median(rank[name]) for rank in ranks) / 1e3 for name in notes if "per peer" not in name}
    return {
        "breakdown": {phase: mean[phase] for phases in PHASES.values() for phase in phases},
        "waits": {
            op: [[fmean(column) / 1e3 for column in zip(*rank[f"per peer {op}"], strict=True)] for rank in ranks]
            for op in PHASES
        },
        "line_latency_ns": lines,
        "overhead": {name.removeprefix("overhead "): us for name, us in mean.items() if name.startswith("overhead")},
    }


def _pair(notes: _Notes, buffer: Buffer, tokens: Inputs) -> None:
    arguments = tokens.x, tokens.topk_idx, tokens.topk_weights
    rows, weights, handle = notes.timed("dispatch", lambda: buffer.dispatch(*arguments), "no_grad")
    notes.timed("combine", lambda: buffer.combine(rows, weights, handle), "no_grad")


def _pair_with_gradients(notes: _Notes, buffer: Buffer, tokens: Inputs) -> None:
    """Run forward and backward of both ops. Backward is one walk of the graph, as in a model, shared by its two ops."""
    x, topk_weights = tokens.x.detach().requires_grad_(), tokens.topk_weights.detach().requires_grad_()
    rows, weights, handle = notes.timed("dispatch", lambda: buffer.dispatch(x, tokens.topk_idx, topk_weights), "grad")
    out = notes.timed("combine", lambda: buffer.combine(rows, weights, handle), "grad")
    in_combine: list[int] = []
    rows.register_hook(lambda grad: in_combine.extend(notes.spans()))  # between the two ops
    start = perf_counter_ns()
    torch.autograd.grad(out, (x, topk_weights), out)
    wall = perf_counter_ns() - start
    notes["overhead each backward grad"].append((wall - sum(in_combine) - sum(notes.spans())) / 2)


def line_latency_ns(world: World, buffer: Buffer, inputs: Inputs) -> list[list[float]]:
    """Return [rank][peer], the time to read a line that the peer has just written, after small dispatches.

    Large ones evict these lines, which then look as far as those of a peer with another cache. Each dispatch looks at
    one peer, and an estimate needs several to rise.
    """
    few = slice(FEW_TOKENS)
    with torch.no_grad():
        for _ in range(LOOKS * (world.size - 1)):
            buffer.dispatch(inputs.x[few], inputs.topk_idx[few], inputs.topk_weights[few])
    return [json.loads(text) for text in world.gather(json.dumps(buffer.timings()["line_latency_ns"]))]


class _OpClock(TorchDispatchMode):
    """Sums the time inside moe_rt's communication ops, forward and backward, and the part of it spent waiting."""

    OPS = ("dispatch", "combine", "dispatch_backward", "combine_backward")

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        self._buffer, self.inside, self.waiting = buffer, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "moe_rt" or func._opname not in self.OPS:
            return func(*args, **(kwargs or {}))
        start = perf_counter_ns()
        result = func(*args, **(kwargs or {}))
        self.inside += perf_counter_ns() - start
        self.waiting += self._buffer.timings()["wait_ns"]
        return result


def observe_layer(world: World, buffer: Buffer, steps: Sequence[Step], cold: bool) -> dict[str, Any]:
    """phase -> share of the layer's time inside moe_rt's ops, and the part of it spent waiting for a peer; in percent,
    median over iterations, mean over ranks."""
    shares: dict[str, dict[str, float]] = {}
    for step in steps:
        inside, waiting = [], []
        for i in range(ITERS // 3):
            world.meet(cold)
            with torch.no_grad(), _OpClock(buffer) as clock:
                start = perf_counter_ns()
                step.run(i)
                wall = perf_counter_ns() - start
            inside.append(100 * clock.inside / wall)
            waiting.append(100 * clock.waiting / wall)
        ranks = [json.loads(text) for text in world.gather(json.dumps([median(inside), median(waiting)]))]
        means = [fmean(column) for column in zip(*ranks, strict=True)]
        shares[step.phase] = {"in_ops": means[0], "of_it_waiting": means[1]}
    return {"share": shares}
