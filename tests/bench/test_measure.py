"""An iteration lasts from the first rank's start to the last rank's end, on a clock that the steps advance."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt.lab.bench.contestants.base import Step
from moe_rt.lab.bench.measure import Times, measure
from moe_rt.lab.bench.world import SpinBarrier, World, barrier_bytes
from moe_rt.lab.testing.rounds import WrongOutput

NOW = 0  # nanoseconds


@pytest.fixture(autouse=True)
def _the_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", int)  # it takes most of the time of a short measurement
    for module in ("measure", "world"):
        monkeypatch.setattr(f"moe_rt.lab.bench.{module}.perf_counter_ns", lambda: NOW)


def pass_time(ns: int) -> None:
    global NOW
    NOW += ns


def world_of(*others: Callable[[Any], Any], meet: Callable[[], object] = int, cool: Any = int) -> World:
    """Return rank 0's world; each function computes another rank's clocks from rank 0's."""
    board: Any = SimpleNamespace(
        all_gather=lambda text, timeout_s: [text, *(json.dumps(other(json.loads(text))) for other in others)]
    )
    barrier: Any = SimpleNamespace(wait=meet)
    processor: Any = SimpleNamespace(finish=lambda: pass_time(300), cool=cool)
    group: Any = None
    return World(0, 1 + len(others), group, board, barrier, processor, mpi=False)


def moved(start: int, end: int, error: str = "") -> Callable[[Any], Any]:
    """A rank that starts and ends later than rank 0 by these times, or earlier."""

    def clocks(of_rank_0: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                "error": error,
                **{kind: [(a + start, b + end) for a, b in clock[kind]] for kind in ("isolated", "chains")},
            }
            for clock in of_rank_0
        ]

    return clocks


def nothing(part: float) -> None:
    pass


class Steady:
    """A call lasts as long as its index says; the output is the index of the input."""

    def __init__(self, lasts: Callable[[int], int]) -> None:
        self.inputs: list[int] = []
        self._lasts = lasts
        self.checked: list[tuple[int, Any]] = []

    def step(self, phase: str = "") -> Step:
        return Step(self._run, lambda i, output: self.checked.append((i, output)), phase)

    def _run(self, i: int) -> int:
        self.inputs.append(i)
        pass_time(self._lasts(len(self.inputs) - 1))
        return i


def test_an_iteration_lasts_over_all_ranks_and_a_chain_over_its_length() -> None:
    """Seven iterations in rounds of 1, 1, 2, 1, 2 follow two to warm up, which do not affect the times.

    Call c takes (c + 1) us, and waiting for the processor 0.3 us. The first call of a turn is also untimed, so calls
    are: 0 and 1 to warm up; 2 untimed, 3 isolated, 4 a chain; 5, 6, 7; 8, isolated 9 and 10, chain 11 and 12; 13, 14,
    15; 16, isolated 17 and 18, chain 19 and 20.
    """
    steady = Steady(lambda call: 1000 * (call + 1))
    # Rank 1 starts 0.2 us before rank 0 and ends before it; rank 2 starts after rank 0 and ends 0.4 us after it. Each
    # span is therefore 0.6 us longer than rank 0's; no single rank took that long.
    world = world_of(moved(-200, -50), moved(100, 400))
    (times,) = measure(world, [steady.step()], 7, 2, cold=False, progress=nothing)
    own = [4, 7, 10, 11, 15, 18, 19]
    assert times.isolated == pytest.approx([us + 0.3 + 0.6 for us in own])
    chains = [5, 8, 12 + 13, 16, 20 + 21]
    lengths = [1, 1, 2, 1, 2]
    assert times.free_running == pytest.approx([(us + 0.9) / n for us, n in zip(chains, lengths, strict=True)])
    assert times.errors == []
    assert len(steady.inputs) == 21


@pytest.mark.parametrize("iters", [*range(1, 26), 200])
def test_no_output_is_right_both_times_that_it_is_checked(iters: int) -> None:
    """A contestant that always returns its first result is caught for any number of alternating inputs."""
    steady = Steady(lambda call: 1)
    measure(world_of(), [steady.step()], iters, 3, cold=False, progress=nothing)
    (isolated, chained) = steady.checked
    assert isolated[0] == isolated[1]
    assert chained[0] == chained[1] == steady.inputs[-1]
    for rotations in range(2, 9):
        assert isolated[0] % rotations != chained[0] % rotations


@pytest.mark.parametrize("late", [0, 1, 5])
def test_the_output_of_an_iteration_before_is_wrong(late: int) -> None:
    """An output of any earlier iteration with another input is wrong; the output of the last call is right."""
    outputs: list[int] = []

    def run(i: int) -> int:
        outputs.append(i % 8)
        return outputs[max(0, len(outputs) - 1 - late)]

    def check(i: int, output: int) -> None:
        if output != i % 8:
            raise WrongOutput(f"input {i % 8}, output {output}")

    (times,) = measure(world_of(), [Step(run, check)], 20, 0, cold=False, progress=nothing)
    assert len(times.errors) == (late > 0)


def test_what_any_rank_says_of_any_step_is_kept() -> None:
    steps = [Step(int, lambda i, output: None), Step(int, lambda i, output: None)]
    first, second = measure(world_of(moved(0, 0), moved(0, 0, "rank 2: off")), steps, 1, 0, False, nothing)
    assert first.errors == second.errors == ["rank 2: off"]


def test_an_isolated_output_that_is_wrong_is_not_forgotten() -> None:
    """A wrong isolated output is reported, even if the last chain's is right."""
    seen: list[int] = []

    def check(i: int, output: int) -> None:
        seen.append(i)
        if len(seen) == 1:
            raise WrongOutput("the first")

    (times,) = measure(world_of(), [Step(int, check)], 4, 0, cold=False, progress=nothing)
    assert times.errors == ["the first"]
    assert len(seen) == 2


def test_steps_have_their_own_times_and_take_turns() -> None:
    """The order rotates from round to round, and the parts of the progress add up to one."""
    order: list[str] = []

    def step(name: str, us: int) -> Step:
        def run(i: int) -> None:
            order.append(name)
            pass_time(1000 * us)

        return Step(run, lambda i, output: None)

    parts: list[float] = []
    times = measure(world_of(), [step("a", 1), step("b", 2), step("c", 3)], 5, 0, False, parts.append)
    assert times == [Times([pytest.approx(us + 0.3)] * 5, [pytest.approx(us + 0.3)] * 5, []) for us in (1, 2, 3)]
    assert "".join(order[::3]) == "abcbcacababcbca"  # three calls a turn
    assert parts == [pytest.approx(1 / 15)] * 15


def test_the_barrier_and_the_cooling_are_not_timed() -> None:
    slow = world_of(meet=lambda: pass_time(10**9), cool=lambda: pass_time(10**9))
    (times,) = measure(slow, [Step(int, lambda i, output: None)], 2, 0, cold=True, progress=nothing)
    assert times.isolated == times.free_running == pytest.approx([0.3, 0.3])


def test_the_barrier_waits_for_every_rank_every_time() -> None:
    """At each pause one more word of one more peer is written; only then may rank 1 of four continue."""
    shared = mmap.mmap(-1, barrier_bytes(4))
    words = memoryview(shared).cast("q")
    arrivals: list[int] = []

    def pause() -> None:
        peer = (0, 2, 3)[len(arrivals) % 3]
        arrivals.append(peer)
        words[peer * 8] += 1

    barrier = SpinBarrier(shared, 1, 4, pause)
    for time in (1, 2):
        barrier.wait()
        assert arrivals == [0, 2, 3] * time
        assert words[1 * 8] == time


@pytest.mark.parametrize("cold", [False, True])
def test_caches_are_filled_before_the_barrier_if_asked(cold: bool) -> None:
    noted: list[str] = []
    processor = SimpleNamespace(cool=lambda: noted.append("cool"), finish=lambda: noted.append("finish"))
    barrier = SimpleNamespace(wait=lambda: noted.append("wait"))
    none: Any = None
    World(0, 2, none, none, barrier, processor, mpi=False).meet(cold)  # type: ignore[arg-type]
    assert noted == [*["cool"] * cold, "finish", "wait"]


def test_inputs_go_on_from_turn_to_turn_and_chains_go_back() -> None:
    """A chain ends on the input next to the last isolated one."""
    inputs: list[int] = []
    measure(world_of(), [Step(inputs.append, lambda i, output: None)], 7, 0, False, nothing)
    first, turns = 0, []
    for share in (1, 1, 2, 1, 2):
        turns += [first, *range(first + 1, first + share + 1), *range(first + 2 * share, first + share, -1)]
        first += 2 * share
    assert inputs == turns
