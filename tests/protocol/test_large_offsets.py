"""Offsets beyond 32 bits: the layout against Python's integers, refused sizes, windows past 4 GiB."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpp_programs import compile_program
from support.routing import make_spec

from moe_rt.config.spec import BufferSpec
from moe_rt.engine.cpu import CpuEngine
from moe_rt.errors import InvalidConfig, SizeOverflow
from moe_rt.faults import planned
from moe_rt.memory.segments import Segments, address_of

MAP_NORESERVE = 0x4000


def up(value: int, to: int) -> int:
    return -(-value // to) * to


def layout(ranks: int, experts: int, tokens: int, hidden: int, topk: int, elem: int, acc: int) -> list[int]:
    """Return the output of layout.cpp, in integers that cannot overflow."""
    row, slots, cursor, offsets = up(hidden * elem, 64), min(topk, ranks), 0, []

    def take(num_bytes: int, align: int) -> None:
        nonlocal cursor
        offsets.append(up(cursor, align))
        cursor = offsets[-1] + num_bytes

    take(104, 128)  # the segment header, at 0
    take(8, 128), take(2 * ranks * 128, 128), take(16 * ranks, 128), take(64 * 128, 128), take(512, 128)
    for _ in range(2):
        take(4 * experts, 128), take(4 * (ranks + 1), 128), take(4 * (ranks + 1), 128)
        take(16 * tokens * slots, 128), take(16 * tokens * topk, 128), take(acc * tokens * topk, 128)
        take(tokens * row, 4096), take(tokens * slots * row, 4096), take(acc * tokens * topk, 128)
    token_rows, partial_rows, scalars = offsets[-3:]
    ends = (token_rows + (tokens - 1) * row, partial_rows + (tokens * slots - 1) * row)
    return [*offsets[1:], up(cursor, 4096), *ends, scalars + (tokens * topk - 1) * acc]


sizes = st.tuples(
    st.integers(1, 2**15 - 1),  # ranks
    st.integers(1, 2**20),
    st.integers(1, 2**31 - 1),  # tokens
    st.integers(1, 2**31 - 1),  # hidden
    st.integers(1, 128),
    st.sampled_from([(2, 4), (4, 4), (8, 8)]),
)


def test_layout_equals_integers_without_bounds() -> None:
    """The layout equals one in unbounded integers for random shapes that a buffer accepts, and for the largest."""
    program = compile_program(Path(__file__).with_name("layout.cpp"), "-fsanitize=undefined")
    shapes = []

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(sizes)
    def collect(drawn: tuple[int, int, int, int, int, tuple[int, int]]) -> None:
        ranks, experts, tokens, hidden, topk, (elem, acc) = drawn
        # The limits of BufferSpec.make: tokens and hidden shrink until neither bound is exceeded.
        tokens = min(tokens, (2**31 - 1) // (ranks * topk))
        hidden = max(1, min(hidden, (2**47 - 1) // (tokens * elem * (2 + 2 * topk)) - 64))
        shapes.append((ranks, experts, tokens, hidden, topk, elem, acc))

    collect()
    text = "\n".join(" ".join(map(str, shape)) for shape in shapes)
    done = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    got = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert got == [layout(*shape) for shape in shapes]
    assert max(line[20] for line in got) > 2**45


@pytest.mark.parametrize(
    "changes",
    [
        {"num_max_tokens_per_rank": 2**30, "num_topk": 1},
        {"num_max_tokens_per_rank": 2**29, "num_topk": 2},
        {"num_max_tokens_per_rank": 2**20, "hidden": 2**26, "num_topk": 1},
        {"num_max_tokens_per_rank": 2**29, "hidden": 2**31 - 1, "num_topk": 1},
        {"num_max_tokens_per_rank": 2**16, "depth": 2**24},
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(SizeOverflow):
        make_spec(2, **changes)
    with pytest.raises(InvalidConfig):  # also a MoeRtError
        make_spec(2, **changes)


def test_more_ranks_than_a_poison_word_names_are_refused() -> None:
    fields = dict(num_max_tokens_per_rank=1, hidden=1, num_topk=1)
    assert make_spec(2**15 - 1, num_experts=2**15 - 1, **fields).num_ranks == 2**15 - 1
    with pytest.raises(SizeOverflow, match=f"group: got {2**15} ranks, expected below 2\\*\\*15"):
        make_spec(2**15, num_experts=2**15, **fields)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def exchange(engines: list[CpuEngine], num_tokens: int) -> list[torch.Tensor]:
    """Run two dispatches and combines on every rank, so that both halves of the windows are used."""
    outs: list[Any] = [None] * len(engines)

    def work(rank: int) -> None:
        engine, spec = engines[rank], engines[rank].spec
        for shift in range(2):
            x = torch.arange(num_tokens * spec.hidden, dtype=torch.float32).reshape(num_tokens, -1) + rank
            idx = (torch.arange(num_tokens) + rank + shift)[:, None] % spec.num_experts
            weights = torch.ones(num_tokens, 1)
            recv_x, recv_weights, _, recv_plan, send_plan = engine.dispatch(x, idx, weights, 0)
            out = engine.combine(recv_x, recv_weights, recv_plan, send_plan, 0)
            outs[rank] = torch.equal(out, x)

    ranks = [threading.Thread(target=work, args=(r,)) for r in range(len(engines))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return outs


def test_windows_past_four_gigabytes() -> None:
    """A segment of more than 16 GiB per rank works, and only the touched rows are resident."""
    spec: BufferSpec = make_spec(
        2, num_max_tokens_per_rank=2**16, hidden=2**14, num_topk=1, num_experts=2, capacity_factor=0.001
    )
    num_bytes, before = spec.shape().segment_bytes(), resident_bytes()
    assert num_bytes > 2**34
    mappings = [mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE) for _ in range(2)]
    addresses = [address_of(m) for m in mappings]
    members = [(os.getpid(), 0)] * 2
    segments = [Segments(addresses, [None, None], [mapping], members=members) for mapping in mappings]
    options: dict[str, Any] = {"timeout_s": 30.0, "num_threads": 1, "isa": "auto", "fault": planned(0, 2, on_cpu=True)}
    engines = [CpuEngine(spec, r, segments[r], **options) for r in range(2)]
    assert exchange(engines, 12) == [True, True]
    assert resident_bytes() - before < 2**27
    for engine in engines:
        engine.close()
