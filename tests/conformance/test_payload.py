"""Rows sent as fp8 or int8: the oracle's bits on every heap, small errors, half the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HEAPS
from support.ranks import Ranks, ThreadRanks
from support.rounds import full_round
from support.routing import buffer_kwargs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidConfig
from moe_rt.lab.testing.rounds import check_bits
from moe_rt.ops.reference import through_codec

MakeRanks = Callable[[str, int], Ranks]
FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Largest error of a row that was coded once, relative to the row's largest value in the same block of 128 and, for
# fp8, to each value: half a unit in the last place of a code, and of the rounding to bf16 after it.
WORST = {FP8: 2**-4, INT8: 0.5 / 127}


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("there", "home"), [(FP8, None), (None, FP8), (FP8, FP8), (INT8, INT8), (INT8, FP8)])
def test_matches_reference(make_ranks: MakeRanks, heap: str, dtype: torch.dtype, there: Any, home: Any) -> None:
    for size, hidden in ((1, 300), (3, 20), (2, 128)):
        spec = make_spec(size, dtype=dtype, hidden=hidden, dispatch_dtype=there, combine_dtype=home)
        make_ranks(heap, size).run(full_round, spec, [12, 0, 7][:size], 3, "random")


def through(codec: torch.dtype, rows: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return rows after one dispatch of a single rank."""
    sizes = {"num_max_tokens_per_rank": len(rows), "num_topk": 1, "num_experts": 1}
    with Buffer(group, hidden=rows.shape[1], dtype=rows.dtype, dispatch_dtype=codec, **sizes) as buffer:
        ones = torch.ones(len(rows), 1)
        recv_x, _, _ = buffer.dispatch(rows, torch.zeros(len(rows), 1, dtype=torch.int64), ones)
        return recv_x[: len(rows)].clone()


@pytest.mark.parametrize("codec", [FP8, INT8])
def test_every_magnitude(codec: torch.dtype) -> None:
    """Blocks of every magnitude, zeros, subnormals and non-finite values: the oracle's bits, and the promised error."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 256, generator=g) * torch.logspace(-42, 37, 400)[:, None]
    rows[0] = 0.0
    rows[1, 5] = float("nan")
    rows[2, 200] = float("inf")
    rows[3, :128] = torch.linspace(-1, 1, 128)
    got = through(codec, rows)
    check_bits("rows", got, through_codec(rows, codec))
    for row, bad, good in ((1, slice(0, 128), slice(128, 256)), (2, slice(128, 256), slice(0, 128))):
        assert got[row, bad].isnan().all(), "a block with something that is not finite is NaN"
        assert got[row, good].isfinite().all(), "and only it"
    blocks, exact = got.view(-1, 128)[8:], rows.view(-1, 128)[8:]
    largest = exact.abs().amax(1, keepdim=True)
    error = (blocks - exact).abs()
    coded = (largest > 2.0**-100).expand_as(exact)
    worst = WORST[codec] * (exact.abs() + largest * 2**-9 if codec is FP8 else largest)
    assert (error <= 1.001 * worst)[coded].all()


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("codec", [FP8, INT8])
def test_codes_have_one_zero(make_ranks: MakeRanks, heap: str, codec: torch.dtype) -> None:
    """Negative values too small for their block, and negative zero, arrive as zero with the oracle's sign."""
    rows = torch.zeros(1, 130)
    rows[0, :4] = torch.tensor([2.5, -3e-6, 3e-6, -0.0])
    got = make_ranks(heap, 1).run(through_group, codec, rows)[0]
    check_bits("rows", got, through_codec(rows, codec))
    assert not got.signbit().any()


def through_group(group: Any, codec: torch.dtype, rows: torch.Tensor) -> torch.Tensor:
    return through(codec, rows, group)


@pytest.mark.parametrize("codec", [FP8, INT8])
def test_round_trip_of_normal_rows(codec: torch.dtype) -> None:
    """The relative error of a row that is coded in dispatch and in combine stays below 4 %."""

    def case(group: ThreadGroup) -> float:
        spec = make_spec(2, num_max_tokens_per_rank=64, hidden=1024, num_topk=2, num_experts=4, dtype=torch.bfloat16)
        codecs = {"dispatch_dtype": codec, "combine_dtype": codec}
        g = torch.Generator().manual_seed(group.rank)
        x = torch.randn(64, 1024, generator=g).bfloat16()
        idx = torch.rand(64, 4, generator=g).topk(2).indices
        with Buffer(group, **{**buffer_kwargs(spec), **codecs}) as buffer:
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.full((64, 2), 0.5))
            out = buffer.combine(recv_x, recv_weights, handle).float()
        return float(((out - x.float()).norm(dim=1) / x.float().norm(dim=1)).max())

    errors = ThreadRanks(2).run(case)
    assert max(errors) < 0.04, errors


@pytest.mark.parametrize("codec", [FP8, INT8])
def test_bytes_on_the_way(codec: torch.dtype) -> None:
    """A coded row uses exactly its bytes in the window that peers read; the bytes after it are unchanged."""
    hidden, tokens = 4096, 5
    group = ThreadGroup.make(1)[0]
    sizes = {"num_max_tokens_per_rank": tokens, "num_topk": 1, "num_experts": 1, "dtype": torch.bfloat16}
    with Buffer(group, hidden=hidden, dispatch_dtype=codec, **sizes) as buffer:
        segment = torch.frombuffer(buffer._engine._segments.mappings[0], dtype=torch.uint8)
        segment[4096:] = 0xA5  # all but control words
        rows = torch.rand(tokens, hidden).bfloat16() + 1
        buffer.dispatch(rows, torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1))
        start = next(at for at in range(4096, len(segment), 4096) if (segment[at : at + hidden] != 0xA5).sum() > 4000)
        window = segment[start : start + tokens * 2 * hidden].view(tokens, 2 * hidden)
    scales = 4 * hidden // 128
    assert (window[:, hidden + scales :] == 0xA5).all()
    assert (hidden + scales) / (2 * hidden) < 0.52
    assert all((row[:hidden] != 0xA5).any() and (row[hidden : hidden + scales] != 0xA5).any() for row in window)


def test_what_cannot_be_coded() -> None:
    with pytest.raises(InvalidConfig, match=r"dispatch_dtype: got torch.float16 for rows of torch.bfloat16"):
        make_spec(2, dtype=torch.bfloat16, dispatch_dtype=torch.float16)
    with pytest.raises(InvalidConfig, match=r"combine_dtype: got torch.int8 for rows of torch.float64"):
        make_spec(2, dtype=torch.float64, combine_dtype=torch.int8)
