"""Time of a dispatch and combine pair for few and many tokens, in a replayed graph, and the host time to issue an
op."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from moe_rt.comm.buffer import Buffer
from moe_rt.gpucheck.bandwidth import Flush, Timer
from moe_rt.gpucheck.steps import Check, Table
from moe_rt.heap.rendezvous import ThreadGroup
from moe_rt.heap.thread_ranks import ThreadRanks, torch_device

TOKENS = (1, 8, 64, 512, 1024, 4096, 8192)
HIDDEN, TOPK, EXPERTS = 7168, 8, 64
WARM_UP, REPLAYS, OPS_IN_A_ROW, LOOPS = 5, 50, 200, 5
TARGET_GRAPH_US, TARGET_HOST_US = 25.0, 15.0


def add_latency(check: Check, runs: int) -> None:
    rows: list[list[Any]] = []
    for tokens in TOKENS[:4] if check.quick else TOKENS:
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
        flush, timers = Flush(self.device), [Timer() for _ in range(WARM_UP + runs)]
        for turn, timer in enumerate(timers):
            flush.run()
            flush.run()
            timer.start()
            self.run(turn)
            timer.stop()
        torch.cuda.current_stream(self.device).synchronize()
        return statistics.median(timer.seconds() for timer in timers[WARM_UP:])

    def replay_seconds(self, runs: int) -> float:
        """Time of one replay among many in a row."""
        stream = torch.cuda.current_stream(self.device)
        for turn in range(WARM_UP):
            self.run(turn)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.run()
        timers = [Timer() for _ in range(WARM_UP + runs)]
        for timer in timers:
            timer.start()
            for _ in range(REPLAYS):
                graph.replay()
            timer.stop()
        stream.synchronize()
        seconds = statistics.median(timer.seconds() for timer in timers[WARM_UP:]) / REPLAYS
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
