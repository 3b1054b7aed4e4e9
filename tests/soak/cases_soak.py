"""A rank of the soak test: ops without a drain, at its own pace, each output compared bit for bit."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support.routing import buffer_kwargs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.config.spec import BufferSpec
from moe_rt.lab.testing.rounds import expect_forward

POOL = 48
LONGEST_RUN = 3  # dispatches without a combine between them: fewer would hide mistakes (docs/protocol.md)


@dataclass(frozen=True)
class Round:
    """This rank's part of a round: inputs and expected outputs of the two ops."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    recv_x: Tensor
    recv_weights: Tensor
    offs: Tensor
    y: Tensor
    out: Tensor


def make_pool(spec: BufferSpec, rank: int) -> list[Round]:
    """Return rounds of every kind of routing; a third of a rank's parts have no tokens."""
    pool = []
    for seed in range(POOL):
        num_tokens = random.Random(seed).choices([0, 0, 1, 3, 7, 12], k=spec.num_ranks)
        inputs = make_inputs(spec, num_tokens, seed, ["random", "topk", "one_expert"][seed % 3])
        received, ys, outs = expect_forward(spec, inputs)
        mine = received[rank]
        y = torch.full((spec.capacity(rank), spec.hidden), float("nan"), dtype=spec.dtype)
        y[: len(ys[rank])] = ys[rank]
        ours = (inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank])
        pool.append(Round(*ours, mine.recv_x, mine.recv_weights, mine.offs, y, outs[rank]))
    return pool


def same(got: Tensor, expected: Tensor) -> bool:
    """True if equal bit for bit."""
    integers = torch.int16 if got.itemsize == 2 else torch.int32
    return torch.equal(got.view(integers), expected.view(integers))


def soak(group: dist.ProcessGroup, ops: int) -> int:
    """Return the number of compared ops."""
    rank = group.rank()
    spec = make_spec(group.size(), dtype=torch.bfloat16, hidden=64, num_experts=7)
    pool, plan, pace = make_pool(spec, rank), random.Random(0), random.Random(rank)  # one plan, a pace for each rank
    done = 0
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        while done < ops:
            rounds = [(plan.choice(pool), plan.randrange(4)) for _ in range(plan.randint(1, LONGEST_RUN))]
            handles = []
            for r, tag in rounds:
                dawdle(pace)
                recv_x, recv_weights, handle = buffer.dispatch(r.x, r.topk_idx, r.topk_weights, tag=tag)
                n = len(r.recv_x)
                assert same(recv_x[:n], r.recv_x), f"recv_x of op {done} on rank {rank}"
                assert same(recv_weights[:n], r.recv_weights), f"recv_weights of op {done} on rank {rank}"
                assert same(handle.offs, r.offs), f"offs of op {done} on rank {rank}"
                handles.append((recv_weights, handle))
                done += 1
            for (r, _), (recv_weights, handle) in zip(rounds, handles, strict=True):
                dawdle(pace)
                assert same(buffer.combine(r.y, recv_weights, handle), r.out), f"out of op {done} on rank {rank}"
                done += 1
    return done


def dawdle(pace: random.Random) -> None:
    """Do nothing mostly, often some tens of microseconds of work, and rarely sleep for some milliseconds."""
    draw = pace.random()
    if draw < 0.002:
        time.sleep(pace.random() * 0.01)
    elif draw < 0.2:
        until = time.perf_counter() + pace.random() * 1e-4
        while time.perf_counter() < until:
            pass
