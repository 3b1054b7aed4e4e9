"""Conformance cases, as functions of a rank: rounds of the real ops, which moe_rt.lab.testing.rounds compares."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from support.routing import Inputs, buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import MoeRtError
from moe_rt.lab.testing.rounds import Expected, expect, play

CPU = torch.device("cpu")
_KEPT = 64
_kept: dict[tuple[Any, ...], Expected] = {}
_lock = threading.Lock()


def expected_once(spec: BufferSpec, inputs: Inputs, seed: int, max_tokens: int | None = None) -> Expected:
    """Return `expect`, which one rank computes for all that are threads, and for the heaps that come next."""
    tensors = [*inputs.xs, *inputs.topk_idx, *inputs.topk_weights]
    key = (spec, seed, max_tokens, *(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors))
    with _lock:
        if key not in _kept:
            if len(_kept) == _KEPT:
                _kept.clear()
            _kept[key] = expect(spec, inputs, seed, max_tokens)
        return _kept[key]


def full_round(
    group: Any, spec: BufferSpec, num_tokens: list[int], seed: int, kind: str, num_threads: int = 1
) -> list[bytes]:
    """Run forward and backward once; compare everything with the reference. Return the outputs' bytes."""
    inputs = make_inputs(spec, num_tokens, seed, kind)
    with Buffer(group, num_threads=num_threads, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        return one_round(buffer, inputs, seed)


def rounds_in_a_row(group: Any, spec: BufferSpec, num_tokens: list[int], seeds: list[int], kind: str) -> None:
    """Run a round for each seed, with different inputs, on one buffer."""
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        for seed in seeds:
            one_round(buffer, make_inputs(spec, num_tokens, seed, kind), seed)


def one_round(buffer: Buffer, inputs: Inputs, seed: int, tag: int = 0) -> list[bytes]:
    outputs = play(buffer, inputs, expected_once(buffer.spec, inputs, seed), CPU, tag)
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in outputs]


def chain(group: Any, pairs: int, route: str = "auto") -> int:
    """Run pairs of dispatch and combine without a drain between them, on three ranks; check the last round in full."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    spec = make_spec(3, route=route, dtype=torch.bfloat16, hidden=64)
    pace = random.Random(rank)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        for i in range(pairs):
            num_tokens = pace.choice([0, 1, 5, 12])
            x = torch.full((num_tokens, spec.hidden), float(rank * 64 + i % 64), dtype=spec.dtype)
            idx = torch.tensor([[(t + i + 3 * k) % 9 for k in range(3)] for t in range(num_tokens)], dtype=torch.int64)
            idx = idx.reshape(-1, 3)
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(num_tokens, 3), tag=i)
            out = buffer.combine(recv_x, recv_weights, handle)
            assert torch.equal(out, (3.0 * x.float()).to(spec.dtype)), f"pair {i} on rank {rank}"
            if pace.random() < 0.02:
                time.sleep(pace.random() * 0.01)
        one_round(buffer, make_inputs(spec, [12, 0, 7], seed=5), seed=5)
    return pairs


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and text of the error that a call raises, or empty ones."""
    try:
        call()
    except MoeRtError as error:
        return type(error).__name__, str(error)
    return "", ""
