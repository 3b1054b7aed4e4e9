"""C++ and Python agree on the protocol, and the documented memory sizes are right."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from protocol.test_statuses import enumerators
from support.instruction_sets import INSTRUCTION_SETS
from support.routing import make_spec

from moe_rt import _engine
from moe_rt.config.codec import Codec
from moe_rt.config.spec import ELEMENTS
from moe_rt.config.topology import Topology
from moe_rt.engine.statuses import CLASSES
from moe_rt.errors import Code
from moe_rt.faults import Action, Point

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", [Point, Action])
def test_enumerators_of_faults_agree(kind: type) -> None:
    assert {e.name: e.value for e in kind} == enumerators("cuda/cpu/fault.h", kind.__name__)


def test_codecs_agree() -> None:
    assert {e.name: e.value for e in Codec} == enumerators("cuda/protocol/core/codec.h", "Codec")


def test_every_code_has_an_error() -> None:
    assert set(CLASSES) == set(Code) - {Code.OK}


def test_elements_agree() -> None:
    names = {"FLOAT32": torch.float32, "BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16, "FLOAT64": torch.float64}
    header = enumerators("cuda/cpu/rows.h", "Elem")
    assert {names[n]: v for n, v in header.items()} == ELEMENTS


def documented_bytes(
    num_ranks: int, tokens: int, hidden: int, topk: int, experts: int, itemsize: int, depth: int = 1
) -> int:
    """Evaluate the formula of docs/protocol.md, without the rounding of each region."""
    row, slots = -(-hidden * itemsize // 64) * 64, min(topk, num_ranks)
    acc = 8 if itemsize == 8 else 4
    control = 128 * (70 + 2 * depth * num_ranks) + 16 * num_ranks
    lists = 4 * experts + 8 * (num_ranks + 1) + 16 * tokens * slots + (16 + acc) * tokens * topk
    windows = tokens * row + tokens * slots * row + acc * tokens * topk
    return control + 2 * depth * (lists + windows)


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("tokens", [1, 100, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_segment_bytes_are_the_formula(num_ranks: int, tokens: int, dtype: torch.dtype, depth: int) -> None:
    sizes: dict[str, Any] = dict(num_max_tokens_per_rank=tokens, hidden=500, num_topk=8, num_experts=64, dtype=dtype)
    spec = make_spec(num_ranks, depth=depth, **sizes)
    expected = documented_bytes(num_ranks, tokens, 500, 8, 64, dtype.itemsize, depth)
    rounding = depth * (2 * (7 * 128 + 2 * 4096) + 4096) + 4096 + 256
    assert expected <= spec.shape().segment_bytes() <= expected + rounding


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_segment_bytes_of_rows_that_return_one_by_one(num_ranks: int, dtype: torch.dtype) -> None:
    """The partials and scalars of the formula give way to a row and a scalar for each entry."""
    sizes: dict[str, Any] = dict(num_max_tokens_per_rank=100, hidden=500, num_topk=8, num_experts=64, dtype=dtype)
    acc, slots = max(4, dtype.itemsize), min(8, num_ranks)
    row, returned = (-(-size // 64) * 64 for size in (500 * dtype.itemsize, 500 * dtype.itemsize + acc))
    expected = documented_bytes(num_ranks, 100, 500, 8, 64, dtype.itemsize)
    expected += 2 * (100 * 8 * returned - 100 * slots * row - acc * 100 * 8)
    shape = make_spec(num_ranks, sums="invariant", **sizes).shape()
    assert expected <= shape.segment_bytes() <= expected + 2 * (7 * 128 + 2 * 4096) + 4096 + 256


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2), (0, 1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("tokens", [1, 100, 4096])
@pytest.mark.parametrize("depth", [1, 3])
def test_room_for_two_levels_is_the_formula(nodes: tuple[int, ...], tokens: int, depth: int) -> None:
    """The space for two levels is the formula of docs/two_level.md: N nodes, G ranks on the largest, F remote ranks of
    the busiest proxy."""
    num_ranks, num_nodes, hidden, topk, experts, acc = len(nodes), max(nodes) + 1, 500, 4, 64, 4
    per_node = [nodes.count(node) for node in range(num_nodes)]
    served = max(sum(-(-g // h) for n, g in enumerate(per_node) if n != m) for m, h in enumerate(per_node))
    sizes = {"num_max_tokens_per_rank": tokens, "hidden": hidden, "num_topk": topk, "num_experts": experts}
    spec = replace(make_spec(num_ranks, depth=depth, **sizes), route="two_level", topology=Topology(nodes))
    flat = documented_bytes(num_ranks, tokens, hidden, topk, experts, 4, depth)
    row, of_node = 2048, min(topk, max(per_node))  # 2000 bytes, padded
    lists = 4 * experts + 8 * (num_ranks + 1) + 16 * tokens * min(topk, num_ranks) + (16 + acc) * tokens * topk
    more_slots = of_node + num_nodes - 1 - min(topk, num_ranks)
    windows = tokens * more_slots * row + (num_nodes - 1) * acc * tokens * topk
    forwarded = served * (tokens * of_node * row + acc * tokens * topk)
    expected = flat + depth * (2 * (windows + forwarded) + served * (lists + tokens * row))
    rounding = depth * (2 * (8 * 128 + 3 * 4096) + 4096 + served * (6 * 128 + 2 * 4096) + 4096) + 256
    assert expected <= spec.shape().segment_bytes() <= expected + rounding


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_room_for_what_is_pushed_is_the_formula(num_ranks: int, tokens: int) -> None:
    spec = make_spec(num_ranks, num_max_tokens_per_rank=tokens, hidden=500, num_topk=8, num_experts=64)
    pushed, slots = min(tokens, 128), min(8, num_ranks)
    lists = 4 * 64 + 8 * (num_ranks + 1) + 16 * pushed * slots + (16 + 4) * pushed * 8
    rows = min(tokens, 64, 2**24 // (num_ranks * 2048)) * 2048  # 2000 bytes, padded
    expected = documented_bytes(num_ranks, tokens, 500, 8, 64, 4) + 2 * num_ranks * (lists + rows)
    rounding = 2 * (7 * 128 + 3 * 4096) + 4096 + 256 + 2 * num_ranks * 6 * 128
    assert expected <= spec.shape(pushes=True).segment_bytes() <= expected + rounding


@pytest.mark.parametrize("num_ranks", [8, 64])
def test_the_document_says_how_large_a_segment_is(num_ranks: int) -> None:
    """The documented segment sizes of DeepSeek-V3 are right, with and without a slot per token and expert."""
    text = (ROOT / "docs/protocol.md").read_text()
    sizes, slots = [], []
    for tokens in (128, 1024):
        spec = make_spec(
            num_ranks,
            num_max_tokens_per_rank=tokens,
            hidden=7168,
            num_topk=8,
            num_experts=256,
            dtype=torch.bfloat16,
        )
        sizes.append(spec.shape().segment_bytes())
        slots.append(4 * 256 * tokens * (2 * 7168 + 7168 // 32))
    assert f"that is {sizes[0] / 1e6:.0f} MB for T = 128 and {sizes[1] / 1e6:.0f} MB for T = 1024" in text
    assert f"(`csrc/config.hpp`): {slots[0] / 1e9:.1f} GB and {slots[1] / 1e9:.1f} GB" in text


def test_windows_do_not_grow_with_ranks_beyond_topk() -> None:
    sizes = [
        make_spec(r, num_max_tokens_per_rank=512, hidden=1024, num_experts=64).shape().segment_bytes() for r in (8, 64)
    ]
    per_rank = 2 * 128 + 16 + 2 * 8
    assert 0 <= sizes[1] - sizes[0] <= 56 * per_rank + 4096


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("hidden", [1, 15, 16, 33, 64, 200])
@pytest.mark.parametrize("stream", [False, True])
def test_row_sums_have_the_same_bits_everywhere(isa: str, dtype: torch.dtype, hidden: int, stream: bool) -> None:
    """Row sums have the same bits with every instruction set, also for row counts that the compiler does not know."""
    g = torch.Generator().manual_seed(hidden)
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    srcs = [torch.randn(hidden, generator=g).to(dtype) for _ in range(6)]
    if dtype is torch.float16:
        srcs[0][0], srcs[1][0] = 6e-8, 3e-6  # denormal
    weights = torch.rand(6, generator=g, dtype=acc)
    expected, addresses = torch.zeros(hidden, dtype=acc), [s.data_ptr() for s in srcs]
    for n in range(7):
        out = torch.empty(hidden, dtype=dtype)
        _engine.weighted_sum(isa, ELEMENTS[dtype], out.data_ptr(), addresses[:n], weights[:n].tolist(), hidden, stream)
        assert torch.equal(out, expected.to(dtype)), n
        if n < 6:
            expected += weights[n] * srcs[n].to(acc)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_rows_with_a_nan_for_a_weight_are_nan(isa: str, dtype: torch.dtype) -> None:
    """A NaN weight with all bits set gives NaN, though rounding to bf16 could carry it into a zero."""
    (weight,) = struct.unpack("<d", b"\xff" * 7 + b"\x7f")
    row = torch.randn(200).to(dtype)
    out = torch.zeros_like(row)
    _engine.weighted_sum(isa, ELEMENTS[dtype], out.data_ptr(), [row.data_ptr()] * 2, [0.5, weight], 200, False)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_conversions_are_torchs(isa: str, dtype: torch.dtype) -> None:
    """Every 16-bit pattern survives a copy; NaN stays NaN; fp32 values round like torch, at every edge."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = patterns.view(dtype)
    out = torch.empty_like(values)
    _engine.weighted_sum(isa, ELEMENTS[dtype], out.data_ptr(), [values.data_ptr()], [1.0], 2**16, False)
    nan = values.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan], values[~nan])
    # Half-way cases: the mean of neighbouring values, scaled from exact fp32 sums of two halves.
    pairs = torch.stack([values[:-1], values[1:]]).contiguous()
    expected = (0.0 + 0.5 * pairs[0].float() + 0.5 * pairs[1].float()).to(dtype)
    got = torch.empty_like(expected)
    n = got.numel()
    _engine.weighted_sum(
        isa, ELEMENTS[dtype], got.data_ptr(), [pairs[0].data_ptr(), pairs[1].data_ptr()], [0.5, 0.5], n, False
    )
    same = (got == expected) | (got.isnan() & expected.isnan())
    assert bool(same.all()), (pairs[:, ~same], got[~same], expected[~same])
