"""The soak's acts on a buffer: random sizes, verified rounds in any mode, refusals, and ends of the group."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.routing import Inputs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import CapacityOverflow, GroupClosed, GroupPoisoned, InvalidInput
from moe_rt.lab.testing.rounds import check_bits, expect, expect_forward, padded, play

CPU = torch.device("cpu")
EVALUATION = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def draw_spec(draw: random.Random, num_ranks: int) -> BufferSpec:
    """Draw any sizes; outputs of every sixth buffer exceed 1 MiB, and so use recycled memory."""
    large = draw.random() < 1 / 6
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    num_experts = draw.randint(num_ranks, 12)
    scattered = [*range(num_ranks), *(draw.randrange(num_ranks) for _ in range(num_experts - num_ranks))]
    draw.shuffle(scattered)
    depth = draw.choice([1, 1, 2])
    codecs = [None, None, None, torch.float8_e4m3fn, torch.int8] if dtype is not torch.float64 else [None]
    return make_spec(
        num_ranks,
        num_max_tokens_per_rank=64 if large else draw.randint(1, 12),
        hidden=8192 if large else draw.choice([1, 8, 20, 64, 130, 256]),
        num_topk=1 if large else draw.randint(1, min(4, num_experts)),
        num_experts=num_experts,
        dtype=dtype,
        placement=draw.choice([None, scattered]),
        capacity_factor=draw.choice([None, None, 0.4, 1.5]),
        overflow=draw.choice(["raise", "drop", "retry"] if depth == 1 else ["raise", "drop"]),
        depth=depth,
        dispatch_dtype=draw.choice(codecs),
        combine_dtype=draw.choice(codecs),
    )


def draw_inputs(draw: random.Random, spec: BufferSpec) -> Inputs:
    """Draw inputs of all ranks; a third of them have no tokens."""
    most = spec.num_max_tokens_per_rank
    num_tokens = [draw.choice([0, most, draw.randint(0, most)]) for _ in range(spec.num_ranks)]
    return make_inputs(spec, num_tokens, draw.randrange(2**31), draw.choice(["random", "topk", "one_expert"]))


def verified_round(buffer: Buffer, draw: random.Random) -> list[Tensor]:
    """Verify training or evaluation against the reference, or an overflow on every rank; return the outputs."""
    spec, mode, tag = buffer.spec, draw.choice(["train", "train", *EVALUATION]), draw.randrange(5)
    inputs = draw_inputs(draw, spec)
    if spec.overflow == "retry":
        spec = replace(spec, capacity_factor=None)  # every row has space after retries
    received, ys, outs = expect_forward(spec, inputs)
    if spec.overflow == "raise" and any(len(r.rows) > spec.capacity(i) for i, r in enumerate(received)):
        with pytest.raises(CapacityOverflow):
            dispatch(buffer, inputs, tag)
        return []
    if mode == "train":
        return play(buffer, inputs, expect(spec, inputs, tag), CPU, tag)
    with EVALUATION[mode]():
        recv_x, recv_weights, handle = dispatch(buffer, inputs, tag)
        out = buffer.combine(padded(ys[buffer.rank], buffer.capacity, CPU), recv_weights, handle)
    mine = received[buffer.rank]
    recv_x = recv_x[: len(mine.recv_x)]
    for name, got, expected in (
        ("offs", handle.offs, mine.offs),
        ("recv_x", recv_x, mine.recv_x),
        ("out", out, outs[buffer.rank]),
    ):
        check_bits(name, got, expected)
    return [recv_x, out]


def dispatch(buffer: Buffer, inputs: Inputs, tag: int) -> tuple[Any, ...]:
    rank = buffer.rank
    return buffer.dispatch(inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank], tag=tag)


def refused_round(buffer: Buffer, draw: random.Random) -> None:
    """One rank's input is wrong, and every rank refuses it in the same op."""
    spec, faulty_rank = buffer.spec, draw.randrange(buffer.num_ranks)
    most, hidden, topk = spec.num_max_tokens_per_rank, spec.hidden, spec.num_topk
    wrong: dict[str, Tensor] = draw.choice(
        [
            {"x": torch.zeros(most, hidden + 1, dtype=spec.dtype)},
            {"x": torch.zeros(most, hidden, dtype=torch.int64)},
            {"x": torch.zeros(most + 1, hidden, dtype=spec.dtype)},
            {"topk_idx": torch.full((most, topk), spec.num_experts)},
            {"topk_idx": torch.full((most, topk), -2)},
            {"topk_idx": torch.zeros(most, topk + 1, dtype=torch.int64)},
            {"topk_weights": torch.zeros(most, topk, dtype=torch.int64)},
            {"topk_weights": torch.zeros(most + 1, topk)},
        ]
    )
    given: dict[str, Tensor] = {
        "x": torch.zeros(most, hidden, dtype=spec.dtype),
        "topk_idx": torch.full((most, topk), -1),
        "topk_weights": torch.zeros(most, topk),
    }
    modes: list[AbstractContextManager[Any]] = [nullcontext(), torch.no_grad(), torch.inference_mode()]
    with pytest.raises(InvalidInput), draw.choice(modes):
        buffer.dispatch(**(given | wrong if buffer.rank == faulty_rank else given))


def ended(buffer: Buffer, draw: random.Random) -> None:
    """One rank closes the buffer, aborts, or raises in its `with` block; all others raise in their next op."""
    faulty_rank, how = draw.randrange(buffer.num_ranks), draw.choice(["close", "abort", "raise"])
    if buffer.rank == faulty_rank:
        if how == "raise":
            with pytest.raises(ZeroDivisionError), buffer:
                raise ZeroDivisionError
        else:
            getattr(buffer, how)()
    inputs = draw_inputs(draw, replace(buffer.spec, capacity_factor=None))
    with pytest.raises((GroupClosed, GroupPoisoned)):
        dispatch(buffer, inputs, 0)
    buffer.close()
