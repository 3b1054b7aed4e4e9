"""A long chain of dispatch and combine pairs on 3 virtual ranks. Ranks wait for each other inside ops only, and windows
are reused."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from moe_rt.comm.buffer import Buffer
from moe_rt.gpucheck.steps import Check
from moe_rt.heap.rendezvous import ThreadGroup
from moe_rt.heap.thread_ranks import ThreadRanks, torch_device
from moe_rt.testing.rounds import Inputs, buffer_kwargs, check_bits, expect_forward, experts, make_inputs, make_spec

SIZE, PAIRS, QUICK_PAIRS = 3, 2000, 200
CHECK_EVERY = 50  # bounds the queued launches to what a stream takes without making the host wait


def check(check: Check) -> None:
    pairs = QUICK_PAIRS if check.quick else PAIRS
    begin = time.monotonic()
    run_chain(check.device, pairs, seconds=check.seconds)
    check.say(f"{pairs} pairs, every {CHECK_EVERY}th output equal, {time.monotonic() - begin:.1f} s")


def run_chain(device: Any, pairs: int, *, seconds: float) -> None:
    """Run the pairs. All inputs are on the device before the first pair, because copying them would drain the
    stream."""
    spec = make_spec(SIZE)
    draw = random.Random(7)
    tokens = [[draw.choice([0, 1, 5, 12]) for _ in range(SIZE)] for _ in range(pairs)]
    drawn = [make_inputs(spec, [12] * SIZE, 10_000 + i) for i in range(min(pairs, 2 * CHECK_EVERY))]
    checked = {i for i in range(pairs) if i % CHECK_EVERY == CHECK_EVERY - 1} | {pairs - 1}
    expected = {i: expect_forward(spec, _cut(drawn[i % len(drawn)], tokens[i]))[2] for i in checked}

    def work(group: ThreadGroup) -> None:
        rank, where, pace = group.rank, torch_device(device), random.Random(group.rank)
        inputs = [[t[rank].to(where) for t in (i.xs, i.topk_idx, i.topk_weights)] for i in drawn]
        with Buffer(group, timeout_s=seconds / 3, **buffer_kwargs(spec)) as buffer, torch.no_grad():
            for i in range(pairs):
                x, idx, weights = (t[: tokens[i][rank]] for t in inputs[i % len(inputs)])
                recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights, tag=i)
                out = buffer.combine(experts(recv_x, rank), recv_weights, handle)
                if i in checked:
                    check_bits(f"pair {i} on rank {rank}", out, expected[i][rank])
                if pace.random() < 0.02:
                    time.sleep(pace.random() * 0.01)
            buffer.check()

    ThreadRanks(SIZE, device).run(work, seconds=seconds)


def _cut(inputs: Inputs, num_tokens: list[int]) -> Inputs:
    lists = (inputs.xs, inputs.topk_idx, inputs.topk_weights)
    return Inputs(*([t[:n] for t, n in zip(ts, num_tokens, strict=True)] for ts in lists))
