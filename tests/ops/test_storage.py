"""Recycled memory: warm for the next output, never shared with a living one."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from moe_rt import Buffer
from moe_rt.native.cpu import cache_bytes
from moe_rt.native.storage import Recycler

SHAPE = (300, 2048)  # over 1 MiB in bf16


def test_a_living_tensor_keeps_its_block() -> None:
    memory = Recycler()
    first = memory.empty(*SHAPE, torch.bfloat16).fill_(1)
    view = first[-1:]
    del first
    second = memory.empty(*SHAPE, torch.bfloat16).fill_(2)
    assert view.eq(1).all()
    assert second.shape == SHAPE
    assert second.is_contiguous()


def test_a_dead_tensors_block_is_used_again() -> None:
    memory = Recycler()
    addresses = set()
    for _ in range(5):
        t = memory.empty(*SHAPE, torch.float32)
        addresses.add(t.data_ptr())
        del t
        gc.collect()
    assert len(addresses) == 1


def test_autograd_keeps_what_it_saved() -> None:
    """combine saves y for its backward; later dispatches must not get y's memory."""
    hidden, tokens = 2048, 300
    sizes = dict(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=1, num_experts=2, dtype=torch.float32)
    with Buffer(None, **sizes) as buffer:
        idx, weights = torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1, requires_grad=True)
        x = torch.randn(tokens, hidden)
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        out = buffer.combine(recv_x, recv_weights, handle)
        del recv_x
        for _ in range(4):
            buffer.dispatch(torch.zeros_like(x), idx, weights)
        (grad,) = torch.autograd.grad(out, weights, torch.ones_like(out))
        torch.testing.assert_close(grad, x.sum(1, keepdim=True), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({1: "32K", 2: "512K", 3: "32768K"}, 32 << 20),
        ({1: "48K", 2: "2M"}, 2 << 20),
        ({}, 32 << 20),
        ({3: "?"}, 32 << 20),
    ],
)
def test_reads_the_last_level_cache(tmp_path: Path, sizes: dict[int, str], expected: int) -> None:
    for level, size in sizes.items():
        index = tmp_path / f"index{level}"
        index.mkdir()
        (index / "level").write_text(f"{level}\n")
        (index / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == expected
