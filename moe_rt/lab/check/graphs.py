"""Forward and backward captured as a CUDA graph: replays on changed inputs equal eager rounds and the reference."""

from __future__ import annotations

import gc
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, torch_device
from moe_rt.lab.check.steps import Check
from moe_rt.lab.testing.rounds import (
    WrongOutput,
    buffer_kwargs,
    check_bits,
    expect_forward,
    experts,
    make_inputs,
    make_spec,
)

REPLAYS, QUICK_REPLAYS, WARM_UP = 20, 5, 3
TIMEOUT_S = 20.0
NAMES = ("out", "grad_x", "grad_topk_weights")


def check(check: Check) -> None:
    replays = QUICK_REPLAYS if check.quick else REPLAYS
    for size in check.sizes or (1, 2):
        with check.part(f"{size} ranks"):
            run_graph(check.device, size, replays, seconds=check.seconds / 2)
            check.say(f"{size} ranks: {replays} replays equal")


def run_graph(device: Any, size: int, replays: int, *, seconds: float = 60.0) -> None:
    """Compare replays with eager rounds. Every rank captures on its own stream; torch captures one graph per process at
    a time."""
    spec = make_spec(size)
    tokens = [spec.num_max_tokens_per_rank] * size  # shapes are fixed in a graph
    inputs = [make_inputs(spec, tokens, 500 + i) for i in range(replays)]
    expected = [expect_forward(spec, given)[2] for given in inputs]
    capturing, ready = Lock(), Barrier(size)
    where = torch_device(device)

    def work(group: ThreadGroup) -> None:
        rank = group.rank
        with Buffer(group, timeout_s=TIMEOUT_S, **buffer_kwargs(spec)) as buffer:
            fixed = [t[rank].to(where, copy=True) for t in (inputs[0].xs, inputs[0].topk_idx, inputs[0].topk_weights)]
            for _ in range(WARM_UP):
                round_trip(buffer, *fixed)
            torch.cuda.current_stream(where).synchronize()
            ready.wait(seconds)  # capturing first waits for the whole device
            with capturing:
                graph, outputs = capture(buffer, fixed, size)
            ready.wait(seconds)
            for turn, given in enumerate(inputs):
                fresh = [t[rank].to(where) for t in (given.xs, given.topk_idx, given.topk_weights)]
                for old, new in zip(fixed, fresh, strict=True):
                    old.copy_(new)
                graph.replay()
                got = [t.clone() for t in outputs]
                eager = round_trip(buffer, *fresh)
                for name, a, b in zip(NAMES, got, eager, strict=True):
                    check_bits(f"replay {turn}, {name} against eager", a, b)
                check_bits(f"replay {turn}, out against the reference", got[0], expected[turn][rank])
            buffer.check()
            torch.cuda.current_stream(where).synchronize()
            ready.wait(seconds)
            graph.reset()

    try:
        ThreadRanks(size, device).run(work, seconds=seconds)
    except BrokenBarrierError as error:
        raise WrongOutput("a rank did not come to capture or to replay") from error


def capture(buffer: Buffer, fixed: list[Tensor], size: int) -> tuple[Any, list[Tensor]]:
    """Capture a round trip on the current stream; return the graph and its output tensors."""
    gc.collect()  # destroying objects during capture would be captured
    graph = torch.cuda.CUDAGraph()
    mode = "global" if size == 1 else "thread_local"
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(buffer_device(fixed)), capture_error_mode=mode):
        outputs = round_trip(buffer, *fixed)
    return graph, outputs


def buffer_device(tensors: list[Tensor]) -> torch.device:
    return tensors[0].device


def round_trip(buffer: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> list[Tensor]:
    """Dispatch, elementwise experts, combine and all their backwards. The loss is the sum of squares."""
    x, topk_weights = x.detach().requires_grad_(), topk_weights.detach().requires_grad_()
    recv_x, recv_weights, handle = buffer.dispatch(x, topk_idx, topk_weights)
    out = buffer.combine(experts(recv_x, buffer.rank), recv_weights, handle)
    grad_x, grad_topk_weights = torch.autograd.grad(out, [x, topk_weights], 2 * out.detach())
    return [out.detach(), grad_x, grad_topk_weights]
