"""Recycled memory is warm for the next output, and never shared with a live one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_rt import Buffer
from moe_rt.engine.cpu import cache_bytes
from moe_rt.engine.storage import Recycler

SHAPE = (300, 2048)  # over 1 MiB in bf16


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t,
        lambda t: t[-1:],
        lambda t: t.detach(),
        lambda t: t.view(torch.int16).numpy(),
        lambda t: torch.utils.dlpack.to_dlpack(t),
        lambda t: t.untyped_storage(),
        lambda t: torch.nn.Parameter(t),
    ],
    ids=["tensor", "view", "alias", "numpy", "dlpack", "storage", "parameter"],
)
def test_a_reference_to_a_tensor_keeps_its_block(keep: Callable[[Tensor], object]) -> None:
    memory = Recycler()
    first = memory.empty(*SHAPE, torch.bfloat16)
    address = first.data_ptr()
    kept = keep(first)
    del first
    second = memory.empty(*SHAPE, torch.bfloat16)
    assert second.data_ptr() != address
    assert second.shape == SHAPE
    assert second.is_contiguous()
    del kept
    gc.collect()
    third = memory.empty(*SHAPE, torch.bfloat16)
    assert third.data_ptr() == address


def test_a_block_serves_every_shape_that_fits() -> None:
    """A block serves every shape that fits, as a new tensor: not a view, and without the state of the previous one."""
    memory = Recycler()
    addresses = set()
    half, single = torch.bfloat16, torch.float32
    for num_rows, dtype in ((300, half), (301, half), (150, single), (150, single), (256, single), (256, half)):
        t = memory.empty(num_rows, 2048, dtype)
        assert (t.shape, t.dtype, t.requires_grad, t.grad_fn, t._base) == ((num_rows, 2048), dtype, False, None, None)
        addresses.add(t.data_ptr())
        t.requires_grad_().register_hook(lambda grad: grad)
        t = t * 2
        del t
    assert len(addresses) == 1


def test_what_another_process_may_read_is_not_used_again() -> None:
    """Memory sent to another process is not reused: sending moves all tensors of the storage to shared memory."""
    memory = Recycler()
    sent = memory.empty(*SHAPE, torch.bfloat16).share_memory_()
    assert sent.is_shared()
    del sent
    assert not memory.empty(*SHAPE, torch.bfloat16).is_shared()


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0], ids=["nothing", "half", "all"])
def test_saving_memory_resizes_a_storage(part: float) -> None:
    """A storage may be resized to nothing and back, as any tensor's; later outputs have all their pages again."""
    memory = Recycler()
    kept = memory.empty(*SHAPE, torch.bfloat16).fill_(3)
    storage, copy = kept.untyped_storage(), kept.clone()
    num_bytes = storage.nbytes()
    assert num_bytes >= kept.numel() * kept.itemsize
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(num_bytes)
    assert torch.equal(kept.copy_(copy), copy)
    storage.resize_(int(part * num_bytes))
    del kept, storage
    fresh = memory.empty(*SHAPE, torch.bfloat16)
    assert fresh.untyped_storage().nbytes() == num_bytes
    assert torch.equal(fresh.copy_(copy), copy)


def test_every_large_output_of_an_op_can_be_resized() -> None:
    hidden, tokens = 2048, 300
    sizes = dict(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=1, num_experts=2, dtype=torch.float32)
    with Buffer(None, **sizes) as buffer:
        x = torch.randn(tokens, hidden, requires_grad=True)
        recv_x, recv_weights, handle = buffer.dispatch(x, torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(300, 1))
        out = buffer.combine(recv_x, recv_weights, handle)
        grad_recv_x, grad_x = torch.autograd.grad(out.sum(), [recv_x, x])
        for t in (recv_x, out, grad_recv_x, grad_x):
            copy, storage = t.detach().clone(), t.untyped_storage()
            num_bytes = storage.nbytes()
            storage.resize_(0), storage.resize_(num_bytes)
            with torch.no_grad():
                assert torch.equal(t.copy_(copy), copy)


def test_a_dead_tensors_block_is_used_again() -> None:
    memory = Recycler()
    addresses = set()
    for _ in range(5):
        t = memory.empty(*SHAPE, torch.float32)
        addresses.add(t.data_ptr())
        del t
        gc.collect()
    assert len(addresses) == 1


def test_what_nobody_wrote_is_nan_where_torch_is_told_to_be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert Recycler().empty(*SHAPE, torch.float32).isnan().all()
        assert (Recycler().empty(*SHAPE, torch.int32) == 2**31 - 1).all()  # torch.empty's fill for dtypes without NaN
    finally:
        torch.use_deterministic_algorithms(False)


def test_tensors_are_of_the_mode_that_is_on() -> None:
    memory = Recycler()
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert memory.empty(*SHAPE, torch.float32).is_inference() is inference


def test_autograd_keeps_what_it_saved() -> None:
    """Autograd's saved tensors are not reused: combine saves y, and later dispatches need other memory."""
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
