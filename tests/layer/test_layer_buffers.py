"""Buffers of one layer on stand-ins: which are made, for which dtype, on which ranks; and what a pickle needs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_rt import ThreadGroup
from moe_rt.buffer import pool
from moe_rt.buffer.pool import GrowingOptions, LayerBuffers
from moe_rt.errors import InvalidConfig

SIZES: dict[str, Any] = dict(hidden=8, num_topk=1, num_experts=2, num_max_tokens_per_rank=4, dtype=torch.float32)


class FakeBuffer:
    """A buffer of one rank of `num_ranks`."""

    def __init__(self, dtype: torch.dtype, rank: int = 0, num_ranks: int = 1, device: str = "cpu") -> None:
        self.spec, self.rank, self.num_ranks = SimpleNamespace(dtype=dtype), rank, num_ranks
        self.device, self.process_group = torch.device(device), None
        self.tags, self.waited, self.aborted = 0, [1] * num_ranks, False

    def new_tag(self) -> int:
        self.tags += 1
        return self.tags

    def reserve_tags(self, tag: int) -> None:
        self.tags = max(self.tags, tag)

    def waited_ns(self) -> list[int]:
        return self.waited

    def abort(self) -> None:
        self.aborted = True


Made = list[tuple[Any, dict[str, Any], FakeBuffer]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return each pool's group, sizes and buffer; buffers are of the rank that `place` has."""
    found: Made = []

    class Pool:
        place: Any = (0, 1, "cpu")

        def __init__(self, group: Any) -> None:
            self.group = group

        def fixed(self, **sizes: Any) -> FakeBuffer:
            found.append((self.group, sizes, FakeBuffer(sizes["dtype"], *Pool.place)))
            return found[-1][2]

    monkeypatch.setattr(pool, "BufferPool", Pool)
    return found


def layer(fixed: bool = False, first: Any = None, group: Any = None, has_kernel: bool = False) -> LayerBuffers:
    return LayerBuffers(group, dict(SIZES), fixed=fixed, has_kernel=has_kernel, first=first)


def test_a_layer_begins_with_a_buffer_of_its_own_or_a_given_one(made: Made) -> None:
    of = ThreadGroup.make(1)[0]
    own = layer(group=of)
    ((group, sizes, buffer),) = made
    assert (group, sizes) == (of, SIZES)
    assert (own.current, own.tag, own.group, own.fixed) == (buffer, 1, of, None)
    given: Any = FakeBuffer(torch.bfloat16)
    given.new_tag()
    other = layer(first=given)
    assert (other.current, other.tag, len(made)) == (given, 2, 1)


def test_rows_of_another_dtype_take_another_buffer(made: Made) -> None:
    of = layer()
    first = of.current
    assert of.use(torch.float32) is first
    second: Any = of.use(torch.float64)
    assert (made[-1][1], of.current, second.tags) == ({**SIZES, "dtype": torch.float64}, second, of.tag)
    assert of.use(torch.float32) is first is of.current
    assert of.use(torch.float64) is second
    assert len(made) == 2
    first.waited, second.waited = [3], [4]  # type: ignore[attr-defined]
    assert of.waited_ns() == [7], "of all buffers"


def test_a_buffer_that_no_row_has_used_goes(made: Made) -> None:
    of = layer()
    of.use(torch.float64)
    assert of.use(torch.float32) is made[2][2], "the first one is made anew"
    of = layer()
    of.use(torch.float32)
    of.use(torch.float64)
    assert of.use(torch.float32) is made[3][2], "it was used"


def test_a_fixed_dtype_stays_and_one_warning_says_so(made: Made) -> None:
    of = layer(fixed=True)
    assert of.fixed is torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of.use(torch.float32) is of.current
    with pytest.warns(
        UserWarning, match="dtype: got torch.float32 in the config of a MoELayer whose .* have torch.float64"
    ):
        assert of.use(torch.float64) is of.current
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of.use(torch.float64) is of.current
    assert len(made) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_kernels_of_experts_are_compiled_before_they_are_needed(
    made: Made, monkeypatch: pytest.MonkeyPatch, device: str, has_kernel: bool
) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(pool.cuda_activation, "prepare", lambda device, dtype: prepared.append((device.type, dtype)))
    monkeypatch.setattr(pool.BufferPool, "place", (0, 1, device))
    monkeypatch.setattr(pool, "_alone", lambda device: f"a group on {device}")
    of = layer(has_kernel=has_kernel)
    of.use(torch.float64)
    expected = [("cuda", torch.float32), ("cuda", torch.float64)]
    assert prepared == (expected if device == "cuda" and has_kernel else [])
    assert [group for group, *_ in made] == [None, f"a group on {device}"], "a layer of one rank stays on one"


def loaded(of: LayerBuffers) -> LayerBuffers:
    """Return what a pickle of these buffers is loaded as."""
    again = LayerBuffers.__new__(LayerBuffers)
    again.__dict__.update(of.__getstate__())
    return again


def test_a_loaded_layer_makes_its_buffers_at_first_use(made: Made) -> None:
    of = layer(group=ThreadGroup.make(1)[0])
    of.tag = 5
    assert copy.deepcopy(of) is of
    again = loaded(of)
    assert len(made) == 1
    buffer: Any = again.current
    assert len(made) == 2
    group, sizes, _ = made[1]
    assert (group.size, group.rank, sizes, buffer.tags) == (1, 0, SIZES, 5)
    assert again.current is buffer
    other = loaded(of)
    other.use(torch.float64)
    assert [sizes["dtype"] for _, sizes, _ in made[2:]] == [torch.float64], "none of the dtype that it does not have"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_layer_over_threads_is_pickled_if_it_is_alone(made: Made, num_ranks: int) -> None:
    pool.BufferPool.place = (0, num_ranks, "cpu")  # type: ignore[attr-defined]
    of = layer(group=ThreadGroup.make(num_ranks)[0])
    if num_ranks == 1:
        assert loaded(of).group is None
        return
    with pytest.raises(InvalidConfig) as raised:
        of.__getstate__()
    got = "pickle: got a layer over a ThreadGroup of 2 ranks, expected one of a single rank or of the default process"
    assert raised.value.args[0].startswith(got)


@pytest.fixture
def of_second_rank(made: Made, monkeypatch: pytest.MonkeyPatch) -> Callable[[], LayerBuffers]:
    """Return a function that loads a layer of rank 1 of 2 of the default group."""

    def load() -> LayerBuffers:
        first: Any = FakeBuffer(torch.float32, 1, 2)
        of = layer(first=first)
        of._travels = True
        return loaded(of)

    return load


def test_a_layer_of_several_ranks_needs_their_group(of_second_rank: Any, made: Made) -> None:
    of = of_second_rank()
    with pytest.raises(InvalidConfig) as raised:
        _ = of.current
    got = "layer: got a pickle of rank 1 of 2 in a process without a default process group, expected"
    assert raised.value.args[0] == f"{got} torch.distributed.init_process_group first"
    assert made == []


@pytest.mark.parametrize("place", [(0, 2), (1, 3), (1, 2)])
def test_a_layer_belongs_to_its_rank(
    of_second_rank: Any, made: Made, monkeypatch: pytest.MonkeyPatch, place: tuple[int, int]
) -> None:
    """A rank with another's layer ends the group, so that its peers raise also."""
    monkeypatch.setattr(pool.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(pool.BufferPool, "place", (*place, "cpu"))
    of = of_second_rank()
    of._group = "the group"  # type: ignore[assignment]
    if place == (1, 2):
        assert of.current is made[0][2]
        assert not made[0][2].aborted
        return
    with pytest.raises(InvalidConfig) as raised:
        _ = of.current
    got = f"layer: got a pickle of rank 1 of 2 on rank {place[0]} of {place[1]}, expected each rank to load its own"
    assert raised.value.args[0].startswith(got)
    assert made[0][2].aborted


@pytest.mark.parametrize("size", [0, -1, 1.5, "7"])
def test_sizes_of_growing_buffers(size: Any) -> None:
    with pytest.raises(InvalidConfig) as raised:
        GrowingOptions(num_max_tokens_per_rank=size)
    expected = f"num_max_tokens_per_rank: got {size!r}, expected a positive integer, or None to grow"
    assert raised.value.args[0] == expected
    assert [GrowingOptions(num_max_tokens_per_rank=good).num_max_tokens_per_rank for good in (1, None)] == [1, None]
