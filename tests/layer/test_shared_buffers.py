"""Layers of one group and size share a buffer, ranks agree on whether one exists, and it grows in steps."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS, HEAPS
from layer.cases_layer import config
from support.ranks import Ranks, ThreadRanks

from moe_rt import Buffer, MoEConfig, MoELayer, ThreadGroup
from moe_rt.buffer.pool import GrowingBuffer, GrowingOptions
from moe_rt.config.options import BufferOptions
from moe_rt.errors import ConfigMismatch

MakeRanks = Callable[[str, int], Ranks]


def after_garbage_of_one_rank(group: Any, closes: bool) -> bool:
    """The first layer's buffer is freed or closed on rank 1, while a reference cycle keeps it on rank 0."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    gc.disable()
    try:
        cycle: list[Any] = [MoELayer(config(timeout_s=60.0), group)]
        if rank == 0:
            cycle.append(cycle)
        elif closes:
            cycle[0].buffer.close()
        else:
            cycle.clear()
        second, third = (MoELayer(config(timeout_s=60.0), group) for _ in range(2))
        out, _ = second(torch.ones(4, 16, device=second.buffer.device))
        return second.buffer is third.buffer and bool(out.isfinite().all())
    finally:
        gc.enable()


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("heap", HEAPS)
def test_garbage_of_one_rank_does_not_decide(make_ranks: MakeRanks, heap: str, closes: bool) -> None:
    assert all(make_ranks(heap, 2).run(after_garbage_of_one_rank, closes))


def tags_after_one_too_many(group: Any) -> list[int]:
    """Rank 1 fails to make a layer after it took its tag."""
    first = MoELayer(config(timeout_s=60.0), group)
    if (group.rank if isinstance(group.rank, int) else group.rank()) == 1:
        first.buffer.new_tag()
    return [MoELayer(config(timeout_s=60.0), group).tag for _ in range(2)]


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_a_layer_that_one_rank_could_not_make_leaves_tags_alike(make_ranks: MakeRanks, heap: str) -> None:
    tags, others = make_ranks(heap, 2).run(tags_after_one_too_many)
    assert tags == others


def test_a_buffer_that_is_outgrown_gets_half_as_much_room_again() -> None:
    """A buffer that is outgrown gets half as much capacity again, so that slowly growing batches make few buffers."""
    sizes = dict(hidden=8, num_topk=1, num_experts=2, dtype=torch.float32)
    growing = GrowingBuffer(ThreadGroup.make(1)[0], GrowingOptions(), **sizes)
    made = []
    for num_tokens in (256, 257, 100):
        idx = torch.zeros(num_tokens, 1, dtype=torch.int64)
        lease = growing.dispatch(torch.ones(num_tokens, 8), idx, torch.ones(num_tokens, 1), tag=1).lease
        made.append(lease.buffer.spec.num_max_tokens_per_rank)
    assert made == [256, 384, 384]


@pytest.mark.parametrize("used", [False, True])
def test_a_buffer_of_another_dtype_goes_unless_it_was_used(used: bool) -> None:
    """layer.to(dtype) before the first forward leaves no buffer of the first dtype; after it, both remain."""
    layer = MoELayer(config(), ThreadGroup.make(1)[0])
    if used:
        layer(torch.ones(4, 16))
    first = weakref.ref(layer.buffer)
    layer.to(torch.float64)
    layer(torch.ones(4, 16, dtype=torch.float64))
    gc.collect()
    assert (first() is not None) == used
    assert layer.buffer.spec.dtype is torch.float64
    assert layer.buffer.spec.hidden == 16


def test_fixed_sizes_that_differ_name_the_first_rank_that_does() -> None:
    sizes = dict(hidden=8, num_topk=1, num_experts=2, dtype=torch.float32)

    def case(group: ThreadGroup) -> None:
        options = GrowingOptions(num_max_tokens_per_rank=(7, 7, 9)[group.rank], timeout_s=60.0)
        GrowingBuffer(group, options, **sizes)._agree(1)

    for rank, raised in enumerate(ThreadRanks(3).outcomes(case)):
        assert isinstance(raised, ConfigMismatch)
        assert (raised.rank, raised.peer) == (rank, 2)
        assert "num_max_tokens_per_rank: got 9 on rank 2, expected 7 as on rank 0" in str(raised)


def test_the_largest_batch_of_any_rank_counts() -> None:
    sizes = dict(hidden=8, num_topk=1, num_experts=2, dtype=torch.float32)

    def case(group: ThreadGroup) -> int:
        return GrowingBuffer(group, GrowingOptions(), **sizes)._agree((3, 11, 5)[group.rank])

    assert ThreadRanks(3).run(case) == [11] * 3


def test_a_graph_keeps_its_buffer_when_a_larger_one_takes_its_place() -> None:
    sizes = dict(hidden=8, num_topk=1, num_experts=2, dtype=torch.float32)
    growing = GrowingBuffer(ThreadGroup.make(1)[0], GrowingOptions(), **sizes)
    x = torch.ones(64, 8, requires_grad=True)

    def pair(x: torch.Tensor) -> torch.Tensor:
        idx = torch.zeros(len(x), 1, dtype=torch.int64)
        received = growing.dispatch(x, idx, torch.ones(len(x), 1), tag=1)
        return received.combine(received.rows)

    out = pair(x)
    pair(torch.ones(65, 8))
    gc.collect()
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(64, 8))


def test_options_are_stated_alike() -> None:
    """A buffer's keyword arguments, a layer's config and BufferOptions have the same options and defaults."""
    stated = {f.name: f.default for f in fields(BufferOptions)}
    arguments = inspect.signature(Buffer).parameters
    assert stated == {name: arguments[name].default for name in stated}
    of_buffers_alone = {"layout", "expert_alignment"}  # a layer's experts fix both of them
    assert {name for name, p in arguments.items() if p.default is not p.empty} == set(stated) | of_buffers_alone
    assert stated.items() <= {f.name: f.default for f in fields(MoEConfig)}.items()
