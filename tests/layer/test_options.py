"""Every option of what users make arrives where it is used, under its name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from support.routing import make_spec
from support.signatures import defaults_of, misplaced, unlike_defaults

from moe_rt import Buffer, MoEConfig, MoELayer, ThreadGroup, Tuning
from moe_rt.buffer import buffer as buffer_module
from moe_rt.buffer.pool import BufferPool, GrowingBuffer, GrowingOptions
from moe_rt.config.options import BufferOptions

OBJECTS = ("placement", "tuning", "dispatch_dtype", "combine_dtype")
CODECS = dict(dispatch_dtype=torch.int8, combine_dtype=torch.float8_e5m2)
SIZES = dict(hidden=8, num_topk=2, num_experts=4, dtype=torch.float32)


class Arrived(Exception):
    """Ends a constructor once its options have arrived."""


def test_options_of_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: dict[str, Any] = {}

    def opened(rendezvous: Any, options: BufferOptions, sizes: dict[str, Any]) -> None:
        arrived.update({f.name: getattr(options, f.name) for f in fields(options)}, **sizes)
        raise Arrived

    monkeypatch.setattr(buffer_module, "open_engine", opened)
    given = unlike_defaults(Buffer, leave_out=(*OBJECTS, "dtype"))
    objects = dict(
        placement=(1, 0), tuning=Tuning(threads=64), dispatch_dtype=torch.int8, combine_dtype=torch.float8_e5m2
    )
    sizes = dict(num_max_tokens_per_rank=3, hidden=5, num_topk=6, num_experts=7, dtype=torch.float64)
    with pytest.raises(Arrived):
        Buffer(ThreadGroup.make(1)[0], **sizes, **objects, **given)
    assert misplaced({**sizes, **objects, **given}, arrived) == {}
    assert {f.name for f in fields(BufferOptions)} <= arrived.keys()


def test_options_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that a layer's config shares with its buffer reach the buffer."""

    def fixed(pool: BufferPool, **sizes: Any) -> None:
        raise Arrived(sizes)

    monkeypatch.setattr(BufferPool, "fixed", fixed)
    shared = {f.name for f in fields(BufferOptions)} & defaults_of(MoEConfig).keys()
    valid = dict(heap="threads", num_threads=2, num_sms=9, capacity_factor=1.5, timeout_s=2.5, init_timeout_s=3.5)
    valid |= dict(
        tuning=Tuning(threads=64),
        overflow="drop",
        route="flat",
        sums="invariant",
        depth=2,
        dispatch_dtype=torch.int8,
        combine_dtype=torch.float8_e5m2,
    )
    given = {name: value for name, value in valid.items() if name in shared}
    assert shared - given.keys() <= {"placement"}
    config = MoEConfig(hidden=256, intermediate=8, num_experts=4, num_topk=2, num_max_tokens_per_rank=7, **given)
    with pytest.raises(Arrived) as raised:
        MoELayer(config, ThreadGroup.make(1)[0])
    assert misplaced({**given, "hidden": 256, "num_max_tokens_per_rank": 7}, raised.value.args[0]) == {}


def test_options_of_a_growing_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(group: Any, **arguments: Any) -> None:
        raise Arrived(arguments)

    given = unlike_defaults(GrowingOptions, leave_out=OBJECTS)
    growing = GrowingBuffer(ThreadGroup.make(1)[0], GrowingOptions(**given), **SIZES)
    monkeypatch.setattr("moe_rt.buffer.pool.Buffer", make)
    with pytest.raises(Arrived) as raised:
        growing._grow(5)
    assert misplaced({**given, **SIZES}, raised.value.args[0]) == {}


@pytest.mark.parametrize("name", sorted(unlike_defaults(GrowingOptions, leave_out=OBJECTS)))
def test_options_that_change_between_two_calls_take_effect(name: str) -> None:
    """A pool returns the same growing buffer until any one option changes, and again from then on."""
    given = unlike_defaults(GrowingOptions, leave_out=OBJECTS)
    pool = BufferPool(ThreadGroup.make(1)[0])
    before, after = GrowingOptions(), GrowingOptions(**{name: given[name]})
    first = pool.growing(before, **SIZES)
    assert pool.growing(GrowingOptions(), **SIZES) is first
    second = pool.growing(after, **SIZES)
    assert second is not first
    assert second.options == after
    assert pool.growing(after, **SIZES) is second
    assert pool.growing(after, **{**SIZES, "dtype": torch.float64}) is not second


@pytest.mark.parametrize(
    ("name", "one", "other"), [("depth", 1, True), ("expert_alignment", 1, True), ("capacity_factor", 2, 2.0)]
)
def test_equal_values_of_other_types_agree(name: str, one: Any, other: Any) -> None:
    """Ranks compare the text of their values."""
    assert make_spec(2, **{name: one}).hash() == make_spec(2, **{name: other}).hash()


def test_options_are_hashable_arguments() -> None:
    """Buffers that are shared have a key of their options, and a placement may be any sequence."""
    arguments = BufferOptions(placement=[1, 0]).arguments()
    assert arguments["placement"] == (1, 0)
    hash(tuple(arguments.values()))
