"""Timing: contestants alternate, and an iteration lasts from the first rank's start to the last rank's end."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

import torch

from moe_rt.lab.bench.contestants.base import Step
from moe_rt.lab.bench.world import World
from moe_rt.lab.testing.rounds import WrongOutput

ROUNDS = 5


@dataclass
class Clock:
    """Times of one step on one rank. perf_counter_ns is one clock for all processes of a Linux machine.

    Attributes:
        isolated: (start, end) of every iteration that began at a barrier; virtual ranks' begin at another zero each.
        chains: (start, end) of every chain of iterations without barriers.
        error: message of a failed check, or "".
    """

    isolated: list[tuple[int, int]] = field(default_factory=list)
    chains: list[tuple[int, int]] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Times:
    """Times of one step over all ranks, in microseconds.

    Attributes:
        isolated: one per iteration.
        free_running: one per chain, divided by the chain's length.
        errors: messages of the ranks' failed checks.
    """

    isolated: list[float]
    free_running: list[float]
    errors: list[str]


def measure(
    world: World, steps: list[Step], iters: int, warmup: int, cold: bool, progress: Callable[[float], None]
) -> list[Times]:
    """Time all steps and check their last outputs. Collective; every rank gets the same result.

    Every round runs each step for its share of `iters` isolated iterations and then as long a chain. The order within a
    round rotates, so that no step always follows the same neighbour. The first iteration after a change of step is not
    timed, since the caches are full of another step's data. With `cold`, this holds before every isolated iteration. A
    chain takes its inputs backwards, so that it ends on the input next to the last isolated iteration's: however many
    inputs alternate, a stale output cannot pass both checks. `progress` is called after each turn with the fraction
    completed.
    """
    clocks = [Clock() for _ in steps]
    rounds = min(ROUNDS, iters)
    shares = [iters * (r + 1) // rounds - iters * r // rounds for r in range(rounds)]
    with torch.no_grad(), _no_garbage_collection():
        for step in steps:
            for i in range(warmup):
                step.run(i)
        for r, share in enumerate(shares):
            for turn in range(len(steps)):
                which = (r + turn) % len(steps)
                _one_turn(world, steps[which], clocks[which], share, cold, check=r == rounds - 1)
                progress(1 / (rounds * len(steps)))
    ranks = [json.loads(text) for text in world.gather(json.dumps([vars(clock) for clock in clocks]))]
    return [_merge([rank[which] for rank in ranks], shares) for which in range(len(steps))]


def _one_turn(world: World, step: Step, clock: Clock, share: int, cold: bool, check: bool) -> None:
    first = 2 * len(clock.isolated)  # inputs continue where the previous turn stopped
    step.run(first)
    for i in range(first + 1, first + 1 + share):
        output = None  # free the previous output outside of the timed iteration
        world.meet(cold)
        begun = world.start()
        output = step.run(i)
        clock.isolated.append(world.stop(begun))
    if check:
        _check(step, first + share, output, clock)
    output = None
    world.meet()
    start = perf_counter_ns()
    for i in range(first + 2 * share, first + 1 + share, -1):
        step.run(i)
    output = step.run(first + 1 + share)
    world.processor.finish()
    clock.chains.append((start, perf_counter_ns()))
    if check:
        _check(step, first + 1 + share, output, clock)


def _check(step: Step, i: int, output: object, clock: Clock) -> None:
    try:
        step.check(i, output)
    except WrongOutput as error:
        clock.error = str(error)


def _merge(ranks: list[dict[str, list[tuple[int, int]]]], lengths: list[int]) -> Times:
    isolated = [_spread(spans) / 1e3 for spans in zip(*(rank["isolated"] for rank in ranks), strict=True)]
    chains = [_spread(spans) / 1e3 for spans in zip(*(rank["chains"] for rank in ranks), strict=True)]
    free_running = [chain / length for chain, length in zip(chains, lengths, strict=True)]
    return Times(isolated, free_running, [str(rank["error"]) for rank in ranks if rank["error"]])


def _spread(spans: tuple[tuple[int, int], ...]) -> int:
    """Time from the first start to the last end: the duration for the whole group, whenever the barrier released each
    rank."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
