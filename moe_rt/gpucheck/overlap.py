"""Overlap of dispatch and combine on few multiprocessors with a matrix product: both together against each by
itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from moe_rt.comm.buffer import Buffer
from moe_rt.gpucheck.bandwidth import Timer
from moe_rt.gpucheck.load import Load
from moe_rt.gpucheck.steps import Check, Table
from moe_rt.heap.rendezvous import ThreadGroup
from moe_rt.heap.thread_ranks import ThreadRanks, num_sms, torch_device

BLOCKS = (8, 24)
TOKENS, SIDE = 4096, 8192  # tokens of the pair, side of the square matrices
WARM_UP = 3


def add_overlap(check: Check, runs: int) -> None:
    rows: list[list[Any]] = []
    for blocks in BLOCKS:
        if blocks > num_sms(check.device):
            continue
        with check.part(f"overlap on {blocks} blocks"):
            alone, product, both = (
                float(f"{s * 1e6:.4g}") for s in times(check.device, blocks, runs, check.seconds / 4)
            )
            hidden = (alone + product - both) / min(alone, product)
            rows.append([blocks, alone, product, both, float(f"{hidden:.2f}")])
    columns = ["blocks", "pair us", "product us", "both us", "hidden"]
    note = f"{TOKENS} tokens, R = 1; product of two {SIDE} x {SIDE} in bf16; hidden: of the shorter, 1 is all of it"
    check.add(Table("Overlap with a product", columns, rows, note))
    if rows:
        check.say("; ".join(f"on {row[0]} blocks {row[4]:g} hidden" for row in rows))


def times(device: Any, blocks: int, runs: int, seconds: float) -> tuple[float, float, float]:
    """Seconds of a pair, of a product, and of both concurrently on separate streams."""

    def work(group: ThreadGroup) -> tuple[float, float, float]:
        where, load = torch_device(device), Load(1, TOKENS, num_sms=blocks)
        x = torch.randn(load.tokens, load.hidden, device=where).bfloat16()
        weights, idx = torch.rand(load.tokens, load.experts, device=where).topk(load.topk)
        a, b = (torch.randn(SIDE, SIDE, device=where).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        with Buffer(group, **load.buffer_kwargs()) as buffer, torch.no_grad():
            beside = torch.cuda.Stream(where)

            def pair() -> None:
                buffer.combine(*buffer.dispatch(x, idx, weights))

            def product() -> None:
                torch.matmul(a, b, out=out)

            def both() -> None:
                main = torch.cuda.current_stream(where)
                beside.wait_stream(main)
                with torch.cuda.stream(beside):
                    product()
                pair()
                main.wait_stream(beside)

            alone, beside_it, together = (_median(call, where, runs) for call in (pair, product, both))
            buffer.check()
        return alone, beside_it, together

    (found,) = ThreadRanks(1, device, reserve_bytes=5 * Load(1, TOKENS).capacity_bytes()).run(work, seconds=seconds)
    return found


def _median(call: Callable[[], None], device: torch.device, runs: int) -> float:
    timers = [Timer() for _ in range(WARM_UP + runs)]
    for timer in timers:
        timer.start()
        call()
        timer.stop()
    torch.cuda.current_stream(device).synchronize()
    return statistics.median(timer.seconds() for timer in timers[WARM_UP:])
