"""The compiled kernels, executed, compute the oracle's results bit for bit, without a race."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.cases_scaled_rows import scaled_round
from ptx.gpu import PtxGpu
from ptx.own_process import isolated
from support.ranks import ThreadRanks
from support.rounds import full_round
from support.routing import make_spec

from moe_rt.config.codec import RowFormat
from moe_rt.config.tuning import Tuning

SIZES = (1, 2, 3, 4)
FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Each of these compiles different kernels: a dtype, the widest vector that divides its rows, and codes of rows.
KERNELS: dict[str, dict[str, Any]] = {
    "fp32 in 16 bytes": dict(dtype=torch.float32),
    "bf16 and codes in 16 bytes, fp8 there and int8 back": dict(
        dtype=torch.bfloat16, hidden=144, dispatch_dtype=FP8, combine_dtype=INT8
    ),
    "fp32 and codes in 16 bytes, int8 there and fp8 back": dict(
        dtype=torch.float32, hidden=272, dispatch_dtype=INT8, combine_dtype=FP8
    ),
    "fp16 in 2 bytes": dict(dtype=torch.float16, hidden=5),
    "bf16 in 8 bytes, int8 there and fp8 back": dict(
        dtype=torch.bfloat16, hidden=132, dispatch_dtype=INT8, combine_dtype=FP8
    ),
}
# Variants of the same kernels: other routing, placement, capacity and layout.
OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "distinct experts": ({}, "topk"),
    "one expert": ({}, "one_expert"),
    "scattered": (dict(placement=[0, 1, 1, 0, 0, 1, 0, 1, 0]), "random"),
    "dropped": (dict(capacity_factor=0.4, overflow="drop"), "topk"),
    "aligned to 16": (dict(expert_alignment=16), "random"),
    "rows of tokens": (dict(layout="tokens"), "random"),
    "rows that return one by one": (dict(sums="invariant", dtype=torch.bfloat16, hidden=136), "random"),
    "coded rows that return one by one": (dict(sums="invariant", hidden=272, combine_dtype=FP8), "random"),
}
# Codes and scales in vectors of 16, 4 and 1 bytes; None means the buffer's own codes.
SCALED = {
    "words": RowFormat(FP8, 144, torch.float32, 4),
    "bytes": RowFormat(torch.uint8, 72, torch.uint8, 5),
    "codes of the buffer": None,
}


def tokens_for(size: int, most: int = 12) -> list[int]:
    """Return different token counts per rank, including zero and `most`."""
    return [(5 * r + most) % (most + 1) if size > 1 else most for r in range(size)]


def rounds_of_sizes(sizes: tuple[int, ...], changes: dict[str, Any], kind: str, seed: int) -> int:
    """Run a round forward and backward of each size; return the number of accesses checked."""
    gpu = PtxGpu(seed)
    for size in sizes:
        ThreadRanks(size, gpu).run(full_round, make_spec(size, **changes), tokens_for(size), seed, kind)
    return gpu.accesses()


@pytest.mark.parametrize("name", KERNELS)
def test_equal_to_the_oracle(name: str) -> None:
    assert isolated(rounds_of_sizes, SIZES, KERNELS[name], "random", 1) > 1e5


@pytest.mark.parametrize("name", OTHERWISE)
def test_with_other_routing(name: str) -> None:
    changes, kind = OTHERWISE[name]
    assert isolated(rounds_of_sizes, (2,), changes, kind, 2) > 1e5


@pytest.mark.parametrize("name", SCALED)
def test_rows_with_scales(name: str) -> None:
    isolated(rounds_with_scales, SCALED[name])


def rounds_with_scales(row: RowFormat | None) -> None:
    spec = make_spec(2, **KERNELS["bf16 and codes in 16 bytes, fp8 there and int8 back"])
    ThreadRanks(2, PtxGpu()).run(scaled_round, spec, row, [12, 7], [1, 2])


def test_more_tokens_than_a_tile_of_routing() -> None:
    isolated(rounds_of_many_tokens)


def rounds_of_many_tokens() -> None:
    """One rank routes with two blocks, one tile each; each of two ranks routes with one block."""
    ThreadRanks(1, PtxGpu(num_sms=16)).run(full_round, make_spec(1, num_max_tokens_per_rank=530), [530], 3, "topk")
    ThreadRanks(2, PtxGpu()).run(full_round, make_spec(2, num_max_tokens_per_rank=530), [530, 514], 3, "random")


def test_what_is_known_does_not_grow() -> None:
    """The number of facts does not grow with launches and streams; otherwise long runs would slow down."""
    facts = isolated(facts_of_rounds)
    assert max(facts) < 2 * facts[0]


def facts_of_rounds() -> list[int]:
    """Return the number of facts after each of several rounds, whose threads have new streams and whose buffers new
    memory."""
    gpu, facts = PtxGpu(), []
    for _ in range(8):
        ThreadRanks(2, gpu).run(full_round, make_spec(2), [12, 7], 1, "random")
        facts.append(gpu.facts())
    return facts


def test_no_room_to_spare() -> None:
    """Rounds complete when every wait has one block, next to one block that sends."""
    isolated(rounds_with_little_room)


def rounds_with_little_room() -> None:
    ThreadRanks(3, PtxGpu(num_sms=4)).run(full_round, make_spec(3), [12, 7, 12], 4, "random")


def test_one_block_that_waits() -> None:
    isolated(rounds_that_wait_apart)


def rounds_that_wait_apart() -> None:
    gpu = PtxGpu()
    spec = make_spec(2, tuning=Tuning(wait_apart_tokens=8))
    ThreadRanks(2, gpu).run(full_round, spec, [12, 7], 5, "random")
    assert {"dispatch_wait", "combine_wait", "combine_backward_wait"} <= set(gpu.launched)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10, 30))
def test_other_orders_of_lanes(seed: int) -> None:
    isolated(rounds_of_sizes, (3,), {}, "random", seed)
