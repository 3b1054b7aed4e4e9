"""Layers of one group and size share a buffer, ranks agree on whether one exists, and it grows in steps."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS, HEAPS
from layer.cases_layer import config
from support.ranks import Ranks, ThreadRanks

from moe_rt import Buffer, MoEConfig, MoELayer, ThreadGroup
from moe_rt.buffer import pool
from moe_rt.buffer.pool import GrowingBuffer, GrowingOptions
from moe_rt.config.options import BufferOptions
from moe_rt.config.placement import Placement
from moe_rt.errors import ConfigMismatch, InvalidConfig, TooManyTokens

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


SIZES: dict[str, Any] = dict(hidden=8, num_topk=1, num_experts=2, dtype=torch.float32)


class FakeBuffer:
    """A buffer that only refuses batches that do not fit, and notes what it is asked."""

    made: list[FakeBuffer]
    heap: str

    def __init__(self, group: Any, *, num_max_tokens_per_rank: int, **named: Any) -> None:
        self.spec = SimpleNamespace(num_max_tokens_per_rank=num_max_tokens_per_rank, dtype=named["dtype"])
        self.group, self.named, self.tags, self.closed, self._num_tags = group, named, list[int](), False, 0
        self.process_group, self.device = "the group", torch.device("cpu")
        self.made.append(self)

    def dispatch(self, x: torch.Tensor, topk_idx: Any, topk_weights: Any, *, tag: int) -> Any:
        self.tags.append(tag)
        if len(x) > self.spec.num_max_tokens_per_rank:
            raise TooManyTokens("got too many")
        return x * 1, topk_weights, None


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeBuffer]:
    """Return the buffers that a pool makes."""
    kind = type("Fake", (FakeBuffer,), {"made": [], "heap": "shm"})
    monkeypatch.setattr(pool, "Buffer", kind)
    made: list[FakeBuffer] = kind.made
    return made


def send(growing: GrowingBuffer, num_tokens: int, tag: int) -> None:
    x = torch.ones(num_tokens, 8)
    growing.dispatch(x, torch.zeros(num_tokens, 1, dtype=torch.int64), torch.ones(num_tokens, 1), tag)


def test_a_batch_that_does_not_fit_is_sent_again_by_the_same_layer(fakes: list[FakeBuffer]) -> None:
    growing = GrowingBuffer(ThreadGroup.make(1)[0], GrowingOptions(timeout_s=7.0), **SIZES)
    for tag, num_tokens in ((3, 64), (4, 65), (5, 0)):
        send(growing, num_tokens, tag)
    assert [(b.spec.num_max_tokens_per_rank, b.tags) for b in fakes] == [(64, [3, 4]), (128, [4, 5])]
    expected = {**GrowingOptions(timeout_s=7.0).arguments(), **SIZES}
    assert all(buffer.named == expected for buffer in fakes)


@pytest.mark.parametrize("first", [0, 1, 63, 64, 65])
def test_sizes_are_whole_granules(fakes: list[FakeBuffer], first: int) -> None:
    send(GrowingBuffer(ThreadGroup.make(1)[0], GrowingOptions(), **SIZES), first, 1)
    assert [b.spec.num_max_tokens_per_rank for b in fakes] == [128 if first > 64 else 64]


def test_a_given_size_stays(fakes: list[FakeBuffer]) -> None:
    growing = GrowingBuffer(ThreadGroup.make(1)[0], GrowingOptions(num_max_tokens_per_rank=9), **SIZES)
    send(growing, 9, 1)
    with pytest.raises(TooManyTokens):
        send(growing, 10, 1)
    assert [(b.spec.num_max_tokens_per_rank, b.tags) for b in fakes] == [(9, [1, 1])]


@pytest.mark.parametrize("size", [None, 64])
@pytest.mark.parametrize("most", [64, 65])
def test_ranks_of_gpus_compare_before_each_dispatch(
    fakes: list[FakeBuffer], monkeypatch: pytest.MonkeyPatch, most: int, size: int | None
) -> None:
    """There a refusal would end the group. A peer's batch counts as well as the own one."""
    monkeypatch.setattr(pool.Buffer, "heap", "nvshmem")
    reduced: list[Any] = []

    def all_reduce(t: torch.Tensor, op: Any, group: Any) -> None:
        reduced.append((int(t), op, group))
        t.fill_(most)

    monkeypatch.setattr(pool, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=torch.distributed.ReduceOp))
    growing = GrowingBuffer(ThreadGroup.make(1)[0], GrowingOptions(num_max_tokens_per_rank=size), **SIZES)
    for _ in range(2):
        send(growing, 5, 1)
    if size is not None:
        assert (len(fakes), reduced) == (1, [])
        return
    assert reduced == [(5, torch.distributed.ReduceOp.MAX, "the group")]
    assert [b.tags for b in fakes] == ([[1, 1]] if most == 64 else [[1], [1]])


def test_layers_join_one_pool_until_one_of_them_runs(fakes: list[FakeBuffer]) -> None:
    one, other = (ThreadGroup.make(1)[0] for _ in range(2))
    first = pool.BufferPool.join(one)
    assert pool.BufferPool.join(one) is first
    second = pool.BufferPool.join(other)
    assert second is not first
    assert second.group is other
    third = pool.BufferPool.join(one)
    assert third.group is one
    first.growing(GrowingOptions(), **SIZES)
    assert pool.BufferPool.join(one) is third, "another pool ran"
    third.growing(GrowingOptions(), **SIZES)
    assert pool.BufferPool.join(one) not in (first, third)


@pytest.mark.parametrize("changes", [{}, {"hidden": 16}, {"dtype": torch.float64}, {"timeout_s": 3.0}], ids=str)
def test_fixed_buffers_are_shared_by_group_and_all_sizes(fakes: list[FakeBuffer], changes: dict[str, Any]) -> None:
    one, other = (ThreadGroup.make(1)[0] for _ in range(2))
    sizes = dict(num_max_tokens_per_rank=4, **SIZES)
    found = [pool.BufferPool(group).fixed(**given) for group in (one, other) for given in (sizes, {**sizes, **changes})]
    assert len({id(buffer) for buffer in found}) == len(fakes) == (4 if changes else 2)
    assert found[0] is not found[2]
    found[0].closed = True  # type: ignore[misc]
    assert pool.BufferPool(one).fixed(**sizes) is not found[0]


def test_ranks_wait_for_the_making_of_a_buffer_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def gather(rendezvous: Any, record: Any, timeout_s: float, what: str) -> Any:
        waited.append(timeout_s)
        raise ConfigMismatch("enough")

    monkeypatch.setattr(pool, "all_gather_records", gather)
    group = ThreadGroup.make(2)[0]
    times = dict(timeout_s=3.0, init_timeout_s=5.0)
    for make in (
        lambda: pool.BufferPool(group).fixed(num_max_tokens_per_rank=4, **SIZES, **times),
        lambda: GrowingBuffer(group, GrowingOptions(**times), **SIZES)._agree(1),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigMismatch, match="enough"):
            make()
    assert waited == [5.0, 5.0]


def test_no_group_is_the_default_group(fakes: list[FakeBuffer], monkeypatch: pytest.MonkeyPatch) -> None:
    world = ThreadGroup.make(1)[0]
    stand_in = SimpleNamespace(is_initialized=lambda: True, group=SimpleNamespace(WORLD=world))
    monkeypatch.setattr(pool, "dist", stand_in)
    sizes = dict(num_max_tokens_per_rank=4, **SIZES)
    assert pool.BufferPool(None).fixed(**sizes) is pool.BufferPool(world).fixed(**sizes)
    assert [buffer.group for buffer in fakes] == [world]


@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_either_half_of_a_graph_keeps_the_buffer(half: str) -> None:
    """Also where only experts train, so that the other half has no graph."""
    growing = GrowingBuffer(ThreadGroup.make(1)[0], GrowingOptions(), **SIZES)

    def run(x: torch.Tensor) -> torch.Tensor:
        idx = torch.zeros(len(x), 1, dtype=torch.int64)
        received = growing.dispatch(x, idx, torch.ones(len(x), 1), tag=1)
        if half == "dispatch":
            return received.rows
        return received.combine(received.rows.detach().requires_grad_())

    out = run(torch.ones(64, 8, requires_grad=half == "dispatch"))
    run(torch.ones(65, 8, requires_grad=half == "dispatch"))
    gc.collect()
    out.sum().backward()


DIFFERENT: dict[str, Any] = {
    "num_max_tokens_per_rank": 5,
    "hidden": 16,
    "num_topk": 1,
    "num_experts": 6,
    "dtype": torch.bfloat16,
    "placement": Placement.from_ranks([1, 0, 0, 1]),
    "layout": "tokens",
    "sums": "ranked",
}


@pytest.mark.parametrize("name", ["", *DIFFERENT])
def test_a_buffer_for_one_forward_fits_in_everything(name: str) -> None:
    """It is refused if one field differs; else its forward is counted as any other."""

    def case(group: Any) -> int:
        sizes: Any = dict(hidden=8, num_experts=4, num_topk=2, num_max_tokens_per_rank=4)
        layer = MoELayer(MoEConfig(**sizes, intermediate=8, sums="invariant"), group)
        options = {**sizes, "dtype": torch.float32, "sums": "invariant"} | ({name: DIFFERENT[name]} if name else {})
        if name == "layout":
            options["sums"] = "ranked"
        try:
            with Buffer(group, **options) as other:
                layer(torch.ones(3, 8), buffer=other)
        finally:
            layer.buffer.close()
        return layer.metrics.snapshot().forwards

    for outcome in ThreadRanks(2).outcomes(case):
        if name:
            with pytest.raises(InvalidConfig, match=rf"buffer\.{name}: got .*, expected .* as in the layer"):
                raise outcome
        else:
            assert outcome == 1
