"""Rows through rings in shared memory: the oracle's bits on an emulated GPU, and the conditions for rings."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.cases_scaled_rows import PLAIN, make_scaled, open_buffer, play_scaled
from support.cpp_programs import compile_program
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.rounds import CPU, one_round
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, Tuning, _engine
from moe_rt.engine.gpu import launcher

FP8 = torch.float8_e4m3fn
# Rows of five pieces, of slightly more than one, and of less than one; gradients of the coded spec are not coded.
SPECS: dict[str, dict[str, Any]] = {
    "fp32": dict(hidden=272),
    "bf16, dropped": dict(dtype=torch.bfloat16, hidden=136, capacity_factor=0.4, overflow="drop"),
    "fp16, aligned": dict(dtype=torch.float16, hidden=8, expert_alignment=16),
    "fp64, rows of tokens": dict(dtype=torch.float64, hidden=34, layout="tokens"),
    "coded": dict(dtype=torch.bfloat16, hidden=144, dispatch_dtype=FP8, combine_dtype=FP8),
}


# Slots have 256 bytes, and fewer of them exist than it takes to have more in flight than lanes have.
SMALL = Tuning(ring_bytes=0)


def ringed(num_ranks: int, threads: int = 3) -> ThreadRanks:
    return ThreadRanks(num_ranks, EmulatedGpu(threads=threads, bulk_bytes=48 << 10))


def ring_rounds(group: Any, spec: Any, num_tokens: list[int], num_sms: int, kind: str = "random") -> None:
    with Buffer(group, timeout_s=60.0, num_sms=num_sms, **buffer_kwargs(spec)) as buffer:
        own: Any = buffer._engine._launcher  # type: ignore[attr-defined]
        assert own.ring.piece == 256
        for seed in (1, 2):
            one_round(buffer, make_inputs(spec, num_tokens, seed, kind), seed)


@pytest.mark.parametrize("changes", SPECS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_to_the_oracle(num_ranks: int, changes: str) -> None:
    spec = make_spec(num_ranks, tuning=SMALL, **SPECS[changes])
    ringed(num_ranks).run(ring_rounds, spec, [12, 0, 7][:num_ranks], 1)


@pytest.mark.parametrize("kind", ["topk", "one_expert"])
def test_few_blocks_and_many_rows(kind: str) -> None:
    """Rings wrap around several times; lists are pulled from 129 tokens upwards, and rows from 65."""
    spec = make_spec(2, hidden=272, num_max_tokens_per_rank=150, tuning=SMALL)
    ringed(2).run(ring_rounds, spec, [150, 131], 2, kind)


def test_warps_of_many_lanes_share_rows() -> None:
    """One lane of each of two warps copies, and both warps share a row if rows are few."""
    ringed(2, threads=64).run(ring_rounds, make_spec(2, hidden=272, tuning=SMALL), [12, 1], 2)


def test_rows_with_scales_go_through_registers() -> None:
    spec = make_spec(2, hidden=PLAIN.num_codes, dtype=torch.bfloat16, tuning=SMALL)
    ringed(2).run(scaled_on_one_block, spec, [12, 7])


def scaled_on_one_block(group: Any, spec: Any, num_tokens: list[int]) -> None:
    inputs = make_inputs(spec, num_tokens, 1)
    with open_buffer(group, spec, num_sms=1) as buffer:
        play_scaled(buffer, inputs, make_scaled(PLAIN, num_tokens, 1), CPU, 1)


def test_what_is_under_way() -> None:
    """The given number of pieces is in flight, one row after another; a row is read once, however many copies it
    has."""
    program = compile_program(Path(__file__).with_name("ring.cpp"), "-O1")
    result = subprocess.run([program], capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stdout
    most, piece, read, written = map(int, result.stdout.split())
    assert (most, piece) == (_engine.RING_LOADS, 1664)
    assert (read, written) == (20 * 16000, 8 * 20 * 16000)


def chosen(num_sms: int | None, bulk_bytes: int = 227 << 10, **changes: Any) -> Any:
    return launcher.ring_for(make_spec(8, **changes), num_sms, scratch_bytes=9000, bulk_bytes=bulk_bytes, warps=16)


def test_when_there_are_rings() -> None:
    large = dict(hidden=7168, dtype=torch.bfloat16, num_topk=8, num_experts=256)
    assert chosen(8, **large).piece == 1536
    assert launcher.under_way(chosen(8, **large), 16) == 144 << 10
    assert chosen(Tuning.ring_blocks, **large) is not None
    assert chosen(Tuning.ring_blocks + 1, **large) is None
    assert chosen(None, **large) is None, "nobody has asked for few blocks"
    assert chosen(8, 99 << 10, **large) is not None, "compute capability 12.0 has less shared memory"
    assert chosen(8, 48 << 10, **large) is None, "lanes have more under way than so small a ring"
    assert chosen(8, 0, **large) is None, "compute capability 8.0 has no bulk copies"
    assert chosen(8, **large | dict(hidden=7172)) is None, "16 bytes do not divide the row"
    assert chosen(8, **large, tuning=Tuning(ring_blocks=7)) is None
