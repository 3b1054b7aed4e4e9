"""Callers that need a number of all ranks are distinguished from callers that must not wait for other ranks.

Each caller is a stack of calls here, so that every part of the decision is met, whatever torch calls today.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import _adafactor
from torch.optim import optimizer as torch_optimizer

from moe_rt.nn import callers


def in_file(file: str, name: str) -> Callable[..., Any]:
    """Return a function `name(ask)` of a file, which returns ask()."""
    made: dict[str, Any] = {}
    exec(compile(f"def {name}(ask):\n    return ask()", file, "exec"), made)
    return made[name]


def by_a_helper(ask: Callable[[], Any]) -> Any:
    return ask()


def wrapper(ask: Callable[[], Any]) -> Any:
    """Call as a user's decorator does, with the name that torch gives to its own around step and hooks."""
    return ask()


class Asks(torch.optim.Optimizer):
    """An optimizer that asks by a function, or by its closure."""

    def __init__(self, by: Callable[..., Any] | None = None) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.by, self.answer = by, None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.answer = self.by(callers.wants_all_ranks) if self.by is not None else closure()
        return self.answer


class Module(nn.Module):
    def forward(self, ask: Callable[[], Any]) -> Any:
        return ask()


class Closure:
    """A closure that is an object."""

    def __call__(self) -> Any:
        return callers.wants_all_ranks()


class Unlike:
    """Has a `self`, and is neither an optimizer nor a module."""

    def call(self, ask: Callable[[], Any]) -> Any:
        return ask()


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (lambda ask: ask(), True),
        (by_a_helper, True),
        (wrapper, True),
        (Unlike().call, True),
        (in_file(torch_optimizer.__file__, "_default_to_fused_or_foreach"), True),
        (in_file(clip_grad.__file__, "clip_grad_norm_"), True),
        (in_file(torch_optimizer.__file__, "wrapper"), False),
        (Module().forward, False),
        (lambda ask: by_a_helper(lambda: Module()(ask)), False),
        (lambda ask: Module()(lambda: in_file(clip_grad.__file__, "clip_grad_norm_")(ask)), True),
    ],
)
def test_inside_a_step(by: Callable[..., Any], expected: bool) -> None:
    optimizer = Asks(by)
    optimizer.step()
    assert optimizer.answer is expected


def test_outside_of_steps() -> None:
    def ask() -> bool:
        return callers.wants_all_ranks()

    assert not ask()
    assert not Unlike().call(ask)
    assert not in_file("a_user_s.py", "clip_grad_norm_")(ask)
    assert in_file(clip_grad.__file__, "of_a_norm")(ask)


def test_closures_and_hooks_look_at_this_rank() -> None:
    def closure() -> bool:
        return by_a_helper(callers.wants_all_ranks)

    for each in (closure, functools.partial(closure), functools.partial(functools.partial(closure)), Closure()):
        assert Asks().step(each) is False
    answers = []
    optimizer = Asks(by_a_helper)
    optimizer.register_step_pre_hook(lambda *_: answers.append(callers.wants_all_ranks()))
    optimizer.register_step_post_hook(lambda *_: answers.append(callers.wants_all_ranks()))
    optimizer.step(closure)
    assert answers == [False, False]
    assert optimizer.answer is True, "a closure that is not called decides nothing"


def test_means_of_squares() -> None:
    """Adafactor, and any function for a root mean square, needs the mean over all ranks when a step calls it."""
    for name in ("rms", "_rms", "get_rms", "_get_rms"):
        optimizer = Asks(in_file("a_user_s.py", name))
        optimizer.by = functools.partial(_asks_for_a_mean, in_file("a_user_s.py", name))
        assert optimizer.step() is True, name
        assert _asks_for_a_mean(in_file("a_user_s.py", name)) is False, "outside of a step"
    for file, name, expected in ((_adafactor.__file__, "any", True), ("a_user_s.py", "norms", False)):
        optimizer = Asks(functools.partial(_asks_for_a_mean, in_file(file, name)))
        assert optimizer.step() is expected


def _asks_for_a_mean(called: Callable[..., Any], _: Any = None) -> Any:
    def op() -> bool:  # stands for the Part, which asks who called it
        return callers.wants_mean_square()

    return called(op)


@pytest.mark.parametrize("file", [clip_grad.__file__, torch.amp.grad_scaler.__file__])
def test_clipping_and_scaling_are_seen_through_ten_calls(file: str) -> None:
    def deep(calls: int) -> bool:
        return deep(calls - 1) if calls else callers.clips_or_scales()

    reads = in_file(file, "of_a_gradient")
    assert reads(lambda: deep(0))
    assert [reads(lambda n=n: deep(n)) for n in (5, 6, 12)] == [True, False, False], "others called something else"
    assert not deep(0)


def test_fsdp_is_the_direct_caller() -> None:
    def op() -> bool:
        return callers.is_fsdp()

    inside = in_file(f"{callers._FSDP}/_fully_shard/_fsdp_param.py", "reset")
    assert inside(op)
    assert not inside(lambda: op())
    assert not op()
