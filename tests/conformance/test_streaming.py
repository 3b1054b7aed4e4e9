"""Rows are stored past the caches from a share of the last-level cache upwards, with the same bits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.instruction_sets import INSTRUCTION_SETS
from support.ranks import ThreadRanks
from support.routing import buffer_kwargs, make_spec
from torch import Tensor

from moe_rt import Buffer, Tuning
from moe_rt.engine import cpu
from moe_rt.group.rendezvous import ThreadGroup

RANKS, T, H, K, E = 2, 40, 520, 3, 8
# Shares for rows published, received, pushed, combined.
SHARES = {"avx2": (0.8, 0.125, 0.1, 0.125), "avx512": (0.8, 0.8, 0.1, 0.05), "portable": (0.8, 0.8, 0.1, 0.05)}


def ops_of_all_ranks(dtype: torch.dtype, tuning: Tuning) -> list[tuple[Tensor, ...]]:
    """Return every op's results on each rank: rows received, combined, and both gradients."""
    results: list[Any] = [None] * RANKS

    def work(rank: int, group: ThreadGroup) -> None:
        g = torch.Generator().manual_seed(rank)
        x = torch.randn(T, H, generator=g).to(dtype).requires_grad_()
        idx, w = torch.rand(T, E, generator=g).topk(K).indices, torch.rand(T, K, generator=g).requires_grad_()
        sizes = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E)
        with Buffer(group, **sizes, dtype=dtype, tuning=tuning) as buffer:
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
            out = buffer.combine(recv_x, recv_weights, handle)
            grads = torch.autograd.grad(out, (x, w), out)
            results[rank] = (recv_x[: int(handle.offs[-1])].detach(), out.detach(), *grads)

    ranks = [threading.Thread(target=work, args=pair) for pair in enumerate(ThreadGroup.make(RANKS))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_streamed_rows_have_the_same_bits(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RT_ISA", isa)
    results = []
    for cache_bytes in (1 << 40, 0):  # nothing is streamed, everything is
        monkeypatch.setattr(cpu, "cache_bytes", lambda size=cache_bytes: size)
        results.append(ops_of_all_ranks(dtype, Tuning(near_ns=1e9)))
    for plain, streamed in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, streamed, strict=True))


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_starts_at_a_share_of_the_last_level_cache(isa: str, near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming starts at a share of the size from `cache_bytes`. Ranks that are near share the cache; otherwise all
    rows for other ranks are streamed."""
    monkeypatch.setenv("MOE_RT_ISA", isa)
    monkeypatch.setattr(cpu, "cache_bytes", lambda: 48 << 20)
    tuning = Tuning(near_ns=1e9 if near else 0.0)
    shared = [int(share * (24 << 20)) for share in SHARES[isa]]
    _, received, _, combined = (int(share * (48 << 20)) for share in SHARES[isa])

    def case(group: ThreadGroup) -> None:
        spec = make_spec(RANKS, num_max_tokens_per_rank=T, num_topk=1, num_experts=RANKS, tuning=tuning)
        x, here, elsewhere = torch.zeros(T, spec.hidden), *(torch.full((T, 1), r) for r in (group.rank, 1 - group.rank))
        with Buffer(group, **buffer_kwargs(spec)) as buffer:
            engine = buffer._engine._engine

            def stream_from() -> list[int]:
                found = engine.stream_from()
                return [found.published, found.received, found.pushed, found.combined]

            assert stream_from() == shared, "as long as nothing is known"
            assert buffer.timings()["line_latency_ns"] == [0.0, 0.0]
            buffer.dispatch(x, here, torch.ones(T, 1))
            assert stream_from() == shared, "nothing of the peer's list was read"
            buffer.dispatch(x, elsewhere, torch.ones(T, 1))
            assert stream_from() == (shared if near else [0, received, 0, combined])
            lines = buffer.timings()["line_latency_ns"]
            assert (lines[group.rank], lines[1 - group.rank] >= 10) == (0.0, True)

    ThreadRanks(RANKS).run(case)
