"""Rows stored past the caches: from a share of the last-level cache on, and with the same bits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rt import Buffer
from moe_rt.heap.rendezvous import ThreadGroup
from moe_rt.native import cpu

RANKS, T, H, K, E = 2, 40, 520, 3, 8
SHARES = {"avx2": (0.125, 0, 0), "avx512": (0.8, 0.8, 0.1), "portable": (0.8, 0.8, 0.1)}  # outputs, published, pushed


def ops_of_all_ranks(dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """What every op gives on each rank: rows received, combined, and both gradients."""
    results: list[Any] = [None] * RANKS

    def work(rank: int, group: ThreadGroup) -> None:
        g = torch.Generator().manual_seed(rank)
        x = torch.randn(T, H, generator=g).to(dtype).requires_grad_()
        idx, w = torch.rand(T, E, generator=g).topk(K).indices, torch.rand(T, K, generator=g).requires_grad_()
        with Buffer(group, num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=dtype) as buffer:
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
@pytest.mark.parametrize("isa", cpu._engine.isas())
def test_streamed_rows_have_the_same_bits(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RT_ISA", isa)
    results = []
    for cache_bytes in (1 << 40, 0):  # nothing is streamed (with AVX2 windows always are), everything is
        monkeypatch.setattr(cpu, "cache_bytes", lambda size=cache_bytes: size)
        results.append(ops_of_all_ranks(dtype))
    for plain, streamed in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, streamed, strict=True))


@pytest.mark.parametrize("isa", cpu._engine.isas())
def test_starts_at_a_share_of_the_last_level_cache(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one that `cache_bytes` finds, and for all ranks together: rows of each kind from a share of their own."""
    monkeypatch.setenv("MOE_RT_ISA", isa)
    monkeypatch.setattr(cpu, "cache_bytes", lambda: 48 << 20)
    with Buffer(None, num_max_tokens_per_rank=1, hidden=8, num_topk=1, num_experts=2, dtype=torch.float32) as buffer:
        engine = buffer._engine._engine  # of the only rank
        assert engine.stream_from() == tuple(int(share * (48 << 20)) for share in SHARES[isa])
