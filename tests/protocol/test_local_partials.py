"""A CPU rank writes partials to its window only for other ranks' tokens, never for its own."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import pytest
import torch
from support.routing import make_spec

from moe_rt.engine.cpu import CpuEngine
from moe_rt.faults import planned
from moe_rt.memory.segments import Segments, address_of

TOKENS, HIDDEN = 6, 48


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_only_partials_of_others_reach_the_window(num_ranks: int, num_threads: int) -> None:
    """Only partials of other ranks reach a window. Every token visits an expert of each rank with weight 2, so a
    partial is twice its row, and no other bytes equal it."""
    spec = make_spec(
        num_ranks, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=num_ranks, num_experts=num_ranks
    )
    mappings = [mmap.mmap(-1, spec.shape().segment_bytes()) for _ in range(num_ranks)]
    addresses, members = [address_of(m) for m in mappings], [(os.getpid(), 0)] * num_ranks
    options: dict[str, Any] = {"timeout_s": 30.0, "isa": "auto", "fault": planned(0, num_ranks, on_cpu=True)}
    engines = [
        CpuEngine(
            spec, r, Segments(addresses, [None] * num_ranks, [m], members=members), num_threads=num_threads, **options
        )
        for r, m in enumerate(mappings)
    ]
    x = torch.arange(1.0, TOKENS * HIDDEN + 1).reshape(TOKENS, HIDDEN)
    outs: list[Any] = [None] * num_ranks

    def work(rank: int) -> None:
        engine, rows = engines[rank], x + 10_000 * rank
        topk_idx = torch.arange(num_ranks).expand(TOKENS, -1).contiguous()
        weights = torch.full((TOKENS, num_ranks), 2.0)
        recv_x, recv_weights, _, recv_plan, send_plan = engine.dispatch(rows, topk_idx, weights, 0)
        outs[rank] = engine.combine(recv_x, recv_weights, recv_plan, send_plan, 0)

    ranks = [threading.Thread(target=work, args=(r,)) for r in range(num_ranks)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    contents = [m[:] for m in mappings]
    for engine in engines:
        engine.close()
    for rank, segment in enumerate(contents):
        rows = x + 10_000 * rank
        assert torch.equal(outs[rank], 2 * num_ranks * rows)
        for row in rows:
            assert segment.count(row.numpy().tobytes()) == 1, "published once"
            assert segment.count((2 * row).numpy().tobytes()) == num_ranks - 1
