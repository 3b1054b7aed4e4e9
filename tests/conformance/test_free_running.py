"""Chains without a drain: skewed and sleeping ranks, zero-token ranks, every output checked, the last one in full."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HEAPS
from harness import Ranks
from rounds import one_round
from routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer

PAIRS = 2000


def chain(group: Any, pairs: int) -> int:
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    spec = make_spec(3, dtype=torch.bfloat16, hidden=64)
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


@pytest.mark.parametrize("heap", HEAPS)
def test_chain(make_ranks: Callable[[str, int], Ranks], heap: str) -> None:
    assert make_ranks(heap, 3).run(chain, PAIRS) == [PAIRS] * 3
