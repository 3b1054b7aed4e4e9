"""Figures of gpucheck in absolute values, from clocks and counts that a test makes up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_rt.errors import GroupClosed, GroupPoisoned, PeerDead, PeerTimeout
from moe_rt.lab.check import measuring, pairs, processes, timing
from moe_rt.lab.check.measuring import Load
from moe_rt.lab.check.scale import Drawn
from moe_rt.lab.check.steps import Check
from moe_rt.lab.testing.rounds import WrongOutput

PAIR_S = 0.001


def test_the_fewest_bytes() -> None:
    """A rank publishes a row by a read and a write; gather and push touch pulled and kept rows; reduce own tokens."""
    assert measuring.fewest_bytes(num_tokens=1, num_pulled=10, num_kept=100, row_bytes=1000) == {
        "dispatch_send": 2_000,
        "dispatch_receive": 110_000,
        "combine_send": 110_000,
        "combine_receive": 11_000,
    }


def test_what_a_load_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those of all ranks' tokens, of distinct pairs of token and rank, and of received rows."""
    load = Load(2, tokens=6, hidden=8, topk=3, experts=4)
    owners = [
        {(rank, token, int(e) // 2) for token, row in enumerate(idx) for e in row}
        for rank, idx in enumerate(Drawn.of(load, 1, torch.device("cpu")).idx)
    ]
    counted: list[Any] = []
    monkeypatch.setattr(pairs, "fewest_bytes", lambda *given: counted.append(given) or {})
    monkeypatch.setattr(pairs, "_spans", lambda points: {})
    kept = [17, 19]

    class Ranks:
        def __init__(self, *given: Any, **how: Any) -> None: ...
        def run(self, work: Any, seconds: float) -> list[Any]:
            return [([], rows, 0.5 + rank) for rank, rows in enumerate(kept)]

    monkeypatch.setattr(pairs, "ThreadRanks", Ranks)
    assert pairs.times_of("cpu", load, 1, 1.0).replayed == 1.5, "the slowest rank counts"
    assert counted == [(12, sum(map(len, owners)), 36, 16)]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a rank on clocks that a test makes up: each pair and each replay of a graph advances them."""
    clock = SimpleNamespace(now=0.0, captured=0, pairs=0)

    class Graph:
        def replay(self) -> None:
            clock.now += clock.captured * PAIR_S

        def reset(self) -> None: ...

    @contextlib.contextmanager
    def graph(made: Graph, **how: Any) -> Iterator[None]:
        clock.pairs = 0
        yield
        clock.captured = clock.pairs

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None:
            self.at = clock.now

        def elapsed_time(self, other: Any) -> float:
            return float(1e3 * (other.at - self.at))

    def dispatch(*inputs: Any) -> tuple[Any, ...]:
        clock.now += PAIR_S / 4
        return ("recv_x",)

    def combine(*received: Any) -> None:
        clock.now += 3 * PAIR_S / 4
        clock.pairs += 1

    for name, value in {"CUDAGraph": Graph, "graph": graph, "Event": Event}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(pairs.time, "perf_counter", lambda: clock.now)
    found: Any = pairs.PairRank.__new__(pairs.PairRank)
    found.buffer = SimpleNamespace(dispatch=dispatch, combine=combine, rank=0)
    found.inputs, found.stream, found.clock = (), SimpleNamespace(synchronize=lambda: None), clock
    found.shared = pairs._Shared(1, 60.0)
    return found


def test_a_pair_among_many_in_a_graph(own: Any) -> None:
    """The time of all pairs of all replays is divided by their number."""
    assert own.replayed() == pytest.approx(PAIR_S)
    assert own.clock.captured == pairs.PAIRS_IN_GRAPH


def test_host_times_are_those_of_one_op(own: Any) -> None:
    assert own.host_seconds() == pytest.approx({"dispatch": PAIR_S / 4, "combine": 3 * PAIR_S / 4})


def test_the_median_of_timed_calls(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that warm up do not count."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own.stream)
    durations = iter([9.0] * timing.OVERLAP_WARM_UP + [5.0, 1.0, 2.0])

    def call() -> None:
        own.clock.now += next(durations)

    assert timing._median(call, torch.device("cpu"), 3) == pytest.approx(2.0)


def test_an_op_lasts_from_the_first_start_to_the_last_end() -> None:
    class At:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def elapsed_time(self, other: At) -> float:
            return 1e3 * (other.seconds - self.seconds)

    def turns(late: float) -> list[list[At]]:
        starts = [10.0 * turn + late for turn in range(pairs.WARM_UP + 3)]
        return [[At(s), At(s + 1 + 7 * (turn < pairs.WARM_UP)), At(s + 4), At(s + 6)] for turn, s in enumerate(starts)]

    assert pairs._spans([turns(0.0), turns(0.5)]) == pytest.approx({"dispatch": 1.5, "combine": 2.5})


def test_the_slowest_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is the maximum over ranks, and is kept in fp64: fp32 would round it."""

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.copy_(torch.tensor([0.1], dtype=torch.float64))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert processes.slowest(0.05) == 0.1


def test_rows_that_cross_links_are_compared_with_links_of_their_way() -> None:
    """A dispatch reads from peers, a combine writes to them."""
    check = Check("cpu", nproc=2)
    ops = [["dispatch", 4, 1.0, 50.0, "read"], ["combine", 4, 1.0, 50.0, "write"]]
    processes._measured(check, "speed", {"read": 100.0, "write": 200.0, "ops": ops})
    assert [row[-1] for row in check.tables[0].rows] == [0.5, 0.25]


def test_bytes_that_cross_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for a rank's own experts do not cross."""
    load = Load(2, tokens=5, hidden=8, topk=2, experts=4)
    weights = torch.rand(5, 4, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch, "rand", lambda *sizes, **how: weights)
    monkeypatch.setattr(processes, "_median", lambda call, device: 1e-6)
    monkeypatch.setattr(processes, "slowest", lambda seconds: seconds)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    buffer = SimpleNamespace(dispatch=lambda *given: (None,) * 3, combine=lambda *given: None, check=lambda: None)
    monkeypatch.setattr(processes, "Buffer", lambda *given, **how: contextlib.nullcontext(buffer))
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    away = sum(bool((row < 2).any()) for row in weights.topk(2).indices)
    expected = float(f"{away * 8 * 2 * 1e6 / 1e9:.4g}")
    found = processes.pairs(group, torch.device("cpu"), {}, load)
    assert found == [["dispatch", 5, 1.0, expected, "read"], ["combine", 5, 1.0, expected, "write"]]


IN_TIME = processes.DEATH_S + processes.SLACK_S


@pytest.mark.parametrize(
    ("error", "seconds", "accepted"),
    [(PeerDead, IN_TIME, True), (PeerTimeout, IN_TIME, True), (GroupPoisoned, IN_TIME, True), (GroupClosed, 0, False),
     (PeerDead, IN_TIME + 0.1, False), (None, 0, False)],
)  # fmt: skip
def test_what_a_killed_process_may_lead_to(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None, seconds: float, accepted: bool
) -> None:
    """A GPU whose peer is killed waits until its timeout, or until another one's has ended the group."""
    clock, ops = SimpleNamespace(now=0.0), iter([None, error])

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def dispatch(*given: Any) -> None:
        if raised := next(ops, None):
            sleep(seconds)
            raise raised("on purpose", rank=0)  # type: ignore[call-arg]

    buffer = SimpleNamespace(dispatch=dispatch, check=lambda: None)
    monkeypatch.setattr(processes, "Buffer", lambda *given, **how: buffer)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(processes.time, "sleep", sleep)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    group = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
    with contextlib.nullcontext() if accepted else pytest.raises(WrongOutput, match="a killed process: got"):
        said = processes.killed(group, torch.device("cpu"), {})
        assert error is not None
        assert said.startswith(error.__name__)
