"""Injected faults, for tests: the environment variable MOE_RT_FAULT names a rank, a point and an action.

    MOE_RT_FAULT=rank=1,op=3,at=after_payload,do=kill

`op` counts the ops of each buffer from 1 (default 1): dispatch, combine, combine_backward, dispatch_backward of a
first training step are 1 to 4. A fault at `between_dispatch_and_combine` or `in_backward` fires before the first
combine, or backward op, from that number on. `pre_rendezvous`, `post_rendezvous` and `in_destroy` are outside ops.
"""

from __future__ import annotations

import os
from enum import IntEnum
from math import isfinite
from typing import TypeVar

from moe_rt import _engine
from moe_rt.errors import FaultInjected, InvalidConfig

VARIABLE = "MOE_RT_FAULT"
Number = TypeVar("Number", int, float)


class Point(IntEnum):
    """Points at which a fault can fire; cuda/cpu/fault.h describes how far the op is at each."""

    NONE = 0
    PRE_RENDEZVOUS = 1
    POST_RENDEZVOUS = 2
    MID_PAYLOAD = 3
    AFTER_PAYLOAD = 4
    AFTER_SOME_FLAGS = 5
    AFTER_ALL_FLAGS = 6
    MID_READ = 7
    BETWEEN_DISPATCH_AND_COMBINE = 8
    IN_BACKWARD = 9
    IN_DESTROY = 10
    BEFORE_PASSING_ON = 11


class Action(IntEnum):
    """Actions: SIGKILL or SIGSTOP to this process, a sleep, FaultInjected, or invalid control data."""

    NONE = 0
    KILL = 1
    STOP = 2
    SLEEP = 3
    RAISE = 4
    CORRUPT = 5


POINTS = {point.name.lower(): point for point in Point if point}
ACTIONS = {action.name.lower(): action for action in Action if action}


def planned(rank: int, num_ranks: int, on_cpu: bool) -> _engine.Fault:
    """Return the fault that MOE_RT_FAULT plans for this rank; an empty one if the variable is not set.

    Raises:
        InvalidConfig: the variable is malformed, for this rank or another, or ranks are not on the CPU.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return _engine.Fault(at=Point.NONE, action=Action.NONE, op=0, seconds=0.0)
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := fields.keys() - {"rank", "op", "at", "do"}:
        raise _nonsense("fields", sorted(unknown), "rank, op, at and do")
    faulty_rank, op = _number("rank", fields.get("rank", ""), int), _number("op", fields.get("op", "1"), int)
    do, _, argument = fields.get("do", "").partition("=")
    at, action = POINTS.get(fields.get("at", "")), ACTIONS.get(do)
    if not 0 <= faulty_rank < num_ranks:
        raise _nonsense("rank", faulty_rank, f"[0, {num_ranks})")
    if op < 1:
        raise _nonsense("op", op, "at least 1")
    if at is None:
        raise _nonsense("at", fields.get("at"), f"one of {', '.join(POINTS)}")
    if action is None or bool(argument) != (action is Action.SLEEP):
        raise _nonsense("do", fields.get("do"), "kill, stop, sleep=SECONDS, raise or corrupt")
    seconds = _number("sleep", argument, float) if argument else 0.0
    if not (isfinite(seconds) and seconds >= 0):
        raise _nonsense("sleep", argument, "seconds")
    if action is Action.CORRUPT and at is not Point.AFTER_PAYLOAD:
        raise _nonsense("at", fields["at"], "after_payload, since only what is not announced yet can be corrupted")
    if not on_cpu:
        raise _nonsense("a fault", text, "none on CUDA ranks")
    mine = rank == faulty_rank
    return _engine.Fault(at=at if mine else Point.NONE, action=action if mine else Action.NONE, op=op, seconds=seconds)


def reach(fault: _engine.Fault, point: Point) -> None:
    """Inject the fault if it is planned at `point`, a point outside ops. Raise FaultInjected if that is its action."""
    if fault.at == point and not fault.strike():
        raise FaultInjected(f"failed at {point.name.lower()} as {VARIABLE} asked")


def _number(name: str, text: str, kind: type[Number]) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise _nonsense(name, text, "a number") from None


def _nonsense(name: str, got: object, expected: str) -> InvalidConfig:
    return InvalidConfig(f"{VARIABLE}: {name}: got {got}, expected {expected}")
