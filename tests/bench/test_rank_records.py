"""A rank of a benchmark: its acts in order and its record, with stand-ins for contestants, clocks and links."""

from __future__ import annotations

import itertools
import json
import mmap
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_rt.config.topology import Topology
from moe_rt.errors import PeerTimeout
from moe_rt.lab.bench import links, rank, world
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.base import Step, Unavailable
from moe_rt.lab.bench.contestants.moe import MoeRt, Timed
from moe_rt.lab.bench.inputs import make_inputs
from moe_rt.lab.bench.measure import Times
from moe_rt.lab.bench.rank import Job
from moe_rt.lab.bench.world import Processor, SpinBarrier, World
from moe_rt.lab.cluster.cluster import Traffic
from moe_rt.lab.testing.rounds import WrongOutput

CASE = Case(ranks=2, tokens=3, hidden=4, topk=1, experts=4, name="a case")
NOTHING: Any = None


def world_of(size: int = 2, number: int = 0, **parts: Any) -> World:
    """Return a rank's world in which all ranks say the same."""
    board: Any = SimpleNamespace(all_gather=lambda text, timeout_s: [text] * size if timeout_s == 600.0 else [])
    barrier: Any = SimpleNamespace(wait=int)
    processor: Any = SimpleNamespace(name="a chip", cache_bytes=64, device=torch.device("cpu"), finish=int, cool=int)
    given = {"group": NOTHING, "board": board, "barrier": barrier, "processor": processor, "mpi": False, **parts}
    return World(number, size, **given)


def job_of(*cases: Case, **changes: Any) -> Job:
    given = dict(contestants=["one", "two"], cores=[0], iters=7, warmup=2, seed=5, cold=True)
    return Job(cases=list(cases), **{**given, **changes})  # type: ignore[arg-type]


class Stage:
    """Stand-ins for all that a case needs, which note what they are asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.missing: dict[str, str] = {}
        for name in ("observe_pair", "observe_layer", "line_latency_ns", "trace_layer"):
            patch.setattr(rank, name, self._noted(name))
        patch.setattr(rank, "find", lambda name: lambda case, world: self._contestant(name, case))
        patch.setattr(rank, "measure", self._measure)
        patch.setattr(rank, "Links", self._links)
        patch.setattr(rank, "round_trip_us", lambda world, topology: 30.0 + topology.num_nodes)

    def _noted(self, name: str) -> Any:
        def call(world: World, *given: Any) -> Any:
            self.done.append((name, *given[1:]))
            return [{name: len(self.done)}] if name == "trace_layer" else {name: len(self.done)}

        return call

    def _contestant(self, name: str, case: Case) -> Any:
        if name in self.missing:
            raise Unavailable(self.missing[name])
        kind = {"moe_rt": MoeRt, "timed": Timed}.get(name, object)

        class Made(kind):  # type: ignore[misc,valid-type]
            def __init__(made) -> None:
                made.case, made.buffer = case, SimpleNamespace(num_bytes=77, route="flat")
                made.name, made.unit = name, f"unit of {name}"

            def steps(made, inputs: Any, expect: Any) -> list[Step]:
                assert not torch.is_grad_enabled()
                for i, tokens in enumerate(inputs):
                    assert torch.equal(tokens.x, make_inputs(case, 5, 1, i).x)
                with pytest.raises(WrongOutput, match="rank 1 received"):
                    expect.rows(0, inputs[0].x[:0, :1], inputs[0].topk_idx[:0, 0])
                phases = ("forward", "both") if case.op == "layer" else ("",)
                return [Step(NOTHING, NOTHING, phase) for phase in phases]

            def close(made) -> None:
                self.done.append(f"close {name}")

        if kind is MoeRt:  # not a kind of it
            made = object.__new__(MoeRt)
            Made.__init__(made)  # type: ignore[arg-type]
            made.steps = lambda inputs, expect: Made.steps(made, inputs, expect)  # type: ignore[method-assign,arg-type]
            made.close = lambda: Made.close(made)  # type: ignore[method-assign,arg-type]
            return made
        return Made()

    def _measure(self, world: World, steps: list[Step], *given: Any) -> list[Times]:
        self.done.append(("measure", len(steps), *given))
        return [Times([1.0 + number], [2.0 + number], []) for number in range(len(steps))]

    def _links(self, case: Case, seed: int, rotations: int) -> Any:
        self.done.append(("links", seed, rotations))
        return SimpleNamespace(least_us=9.0, count=lambda world, step, unit: {"of": [step.phase, unit]})


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_a_record_of_a_pair(stage: Stage) -> None:
    """Contestants are closed one after another; moe_rt's own observations come from the first inputs, and are last."""
    stage.missing["two"] = "there is no two"
    job = job_of(CASE, contestants=["one", "two", "moe_rt", "timed"])
    record = rank.run_case(world_of(number=1), job, CASE, print)
    assert record.pop("results") == [
        {"contestant": name, "phase": "", "isolated": [1.0 + i], "free_running": [2.0 + i], "errors": []}
        for i, name in enumerate(("one", "moe_rt", "timed"))
    ]
    moved = record.pop("bytes")
    assert (moved["logical"], moved["physical"]) == (2 * 8 * 3, 2 * 8 * 3)
    assert record == {
        "case": asdict(CASE),
        "device": "a chip",
        "rotations": 3,  # of 2 * 3 * 8 bytes, to fill twice 64 of them
        "absent": {"two": "there is no two"},
        "line_latency_ns": {"line_latency_ns": 6},
        "moe_rt": {"heap_bytes": 77, "route": "flat", "observe_pair": 4},
    }
    first, *rest = stage.done
    assert first == ("measure", 3, 7, 2, True, print)
    names = [entry if isinstance(entry, str) else entry[0] for entry in rest]
    expected = ["close one", "line_latency_ns", "observe_pair", "close moe_rt", "line_latency_ns", "close timed"]
    assert names == expected
    observed = next(entry for entry in rest if entry[0] == "observe_pair")
    assert (len(observed[1]), observed[2]) == (3, True)


@pytest.mark.parametrize("traced", [False, True])
def test_a_record_of_a_layer(stage: Stage, traced: bool) -> None:
    """Each of moe_rt's kinds adds the events of its own steps to the trace."""
    case = CASE.changed(op="layer")
    record = rank.run_case(
        world_of(number=1), job_of(case, contestants=["moe_rt", "one", "timed"], trace=traced), case, print
    )
    assert [(r["contestant"], r["phase"]) for r in record["results"]] == [
        (name, phase) for name in ("moe_rt", "one", "timed") for phase in ("forward", "both")
    ]
    assert "observe_layer" in record["moe_rt"]
    traces = [entry for entry in stage.done if entry[0] == "trace_layer"]
    assert [[step.phase for step in steps] for _, steps, _ in traces] == [["forward", "both"]] * 2 * traced
    assert [name for *_, name in traces] == ["moe_rt", "timed"] * traced
    assert len(record.get("trace", [])) == 2 * traced


def test_a_record_of_nodes(stage: Stage) -> None:
    case = CASE.changed(nodes=2, heap="ucx")
    record = rank.run_case(world_of(number=1), job_of(case), case, print)
    assert (record["least_us"], record["round_trip_us"]) == (9.0, 32.0)
    assert [result["link"] for result in record["results"]] == [
        {"of": ["", "unit of one"]},
        {"of": ["", "unit of two"]},
    ]
    assert ("links", 5, 3) in stage.done
    assert "moe_rt" not in record


def test_one_rank_without_a_contestant_is_enough(stage: Stage) -> None:
    """All leave it out, with the first reason that any rank gives."""
    board: Any = SimpleNamespace(all_gather=lambda text, timeout_s: [text, "not here" if asked.pop() else ""])
    asked = [False, True]
    present, absent = rank._enter(world_of(board=board), job_of(CASE), CASE)
    assert ([made.name for made in present], absent) == (["two"], {"one": "not here"})


def test_rank_0_reports(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rank, "run_case", lambda world, job, case, progress: progress(0.25) or {"of": case.name})
    job = job_of(CASE, CASE.changed(tokens=1))
    assert not job.trace
    rank.run_job(world_of(number=1), job)
    assert capsys.readouterr().out == ""
    rank.run_job(world_of(), job)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    part = {"progress": 0.25}
    assert lines == [part, {"record": {"of": "a case"}}, part, {"record": {"of": "a case*"}}]


@pytest.mark.parametrize(
    ("heap", "started"),
    [
        ("shm", ("processes", 2, [0, 1], False)),
        ("nvshmem", ("processes", 2, [0, 1], True)),
        ("threads", ("threads", 2, [0, 1], "cpu")),
        ("loopback", ("threads", 2, [0, 1], "cuda")),
    ],
)
def test_ranks_are_processes_or_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, heap: Any, started: tuple[Any, ...]
) -> None:
    """Threads reserve what the largest case needs; all begin by tying their life to the starter's."""
    done: list[Any] = []
    cases = [CASE.changed(heap=heap, tokens=tokens) for tokens in (2, 9, 4)]
    (tmp_path / "job.json").write_text(job_of(*cases, cores=[0, 1]).to_json())
    monkeypatch.setattr(sys, "argv", ["rank", str(tmp_path)])
    monkeypatch.setattr(rank, "end_with_starter", lambda: done.append("tied"))
    monkeypatch.setattr(rank, "run_job", lambda world, job: done.append((world, len(job.cases))))
    monkeypatch.setattr(rank.dist, "destroy_process_group", lambda: done.append("left"))

    def processes(directory: Path, *given: Any) -> str:
        assert directory == tmp_path
        done.append(("processes", *given))
        return "a world"

    def threads(size: int, cores: list[int], work: Any, device: str, reserve: int) -> None:
        assert reserve == max(case.reserved_bytes for case in cases) == cases[1].reserved_bytes
        done.append(("threads", size, cores, device))
        work("a world")

    monkeypatch.setattr(rank, "join_processes", processes)
    monkeypatch.setattr(rank, "run_threads", threads)
    rank.main()
    assert done == ["tied", started, ("a world", 3), *["left"] * (started[0] == "processes")]


def test_a_barrier_that_a_rank_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(world, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shared: Any = bytearray(3 * 64)
    words = memoryview(shared).cast("q")
    words[16] = 1

    def pause() -> None:
        now[0] += 300.0

    with pytest.raises(PeerTimeout, match="rank 0 did not reach the barrier within 600 s"):
        SpinBarrier(shared, 1, 3, pause).wait()
    assert now == [50.0 + 900.0]
    assert list(words[::8]) == [0, 1, 1]


def test_a_processor_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cooling works through twice the last-level cache, and keeps that memory."""
    monkeypatch.setattr(world, "cache_bytes", lambda: 4096)
    processor = Processor("cpu")
    assert (processor.name, processor.cache_bytes, processor.device) == ("cpu", 4096, torch.device("cpu"))
    processor.finish()
    processor.cool()
    filler = processor._filler
    assert filler is not None
    assert filler.numel() * filler.itemsize == 2 * 4096
    processor.cool()
    assert processor._filler is filler
    assert filler.unique().tolist() == [2]


def test_virtual_ranks_are_timed_by_events_from_a_common_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def elapsed_time(self, other: Event) -> float:
            return other.ms - self.ms

    events = iter([Event(2.5), Event(4.75)])
    done: list[str] = []
    gate: Any = SimpleNamespace(wait=lambda: done.append("gate") or Event(1.0))
    processor: Any = SimpleNamespace(finish=lambda: done.append("finish"))
    monkeypatch.setattr(world, "_event_now", lambda: done.append("event") or next(events))
    of_gpu = world_of(gate=gate, processor=processor)
    assert of_gpu.stop(of_gpu.start()) == (1_500_000, 3_750_000)
    assert done == ["gate", "event", "event", "finish"]


def test_bytes_of_a_step_are_means_over_inputs_of_the_first_rank_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are read when all ranks are still, after their last acknowledgements."""
    done: list[Any] = []
    counted = iter([Traffic(sent=100, received=1000), Traffic(sent=130, received=1600)])
    monkeypatch.setattr(links, "own_traffic", lambda: done.append("count") or next(counted))
    monkeypatch.setattr(links.time, "sleep", lambda seconds: done.append("settle"))
    case = Case(ranks=4, nodes=2, heap="ucx", tokens=2, hidden=4, topk=1, experts=4, rate="1mbit", op="dispatch")
    found = links.Links(case, 0, 3)

    def all_gather(text: str, timeout_s: float) -> list[str]:
        assert json.loads(text) == [30, 600]
        return [text, "[0, 0]", "[60, 90]", "[1, 1]"]

    of_ranks = world_of(
        4, board=SimpleNamespace(all_gather=all_gather), barrier=SimpleNamespace(wait=lambda: done.append("meet"))
    )
    result = found.count(of_ranks, Step(done.append, NOTHING), None)
    assert result == {"sent": [10, 20], "received": [200, 30], "formula": None}
    assert done == ["meet", "settle", "count", "meet", 0, 1, 2, "meet", "settle", "count"]
    formula = found._formula(Step(NOTHING, NOTHING), "node")
    assert formula is not None
    assert len(formula) == 2
    assert found.least_us is not None
    assert links.Links(case.changed(rate=""), 0, 9).least_us is None
    assert [len(links.Links(case, 0, rotations)._rows) for rotations in (3, 4, 9)] == [3, 4, 4]


def test_a_round_trip_between_first_ranks_of_the_first_and_the_last_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends, rank 2 of two nodes answers, and all get rank 0's median in us."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    ticks = iter(range(0, 10**9, 3500))  # each trip takes 3.5 us by this clock
    monkeypatch.setattr(links, "perf_counter_ns", lambda: next(ticks))
    gathered: list[list[str]] = [[""] * 4, [""] * 4]
    meeting = threading.Barrier(4)

    def of_rank(number: int) -> None:
        turn = iter(range(2))

        def all_gather(text: str, timeout_s: float) -> list[str]:
            now = next(turn)
            gathered[now][number] = text
            meeting.wait(600)
            return gathered[now]

        found[number] = links.round_trip_us(world_of(4, number, board=SimpleNamespace(all_gather=all_gather)), topology)

    topology, found = Topology((0, 0, 1, 1)), [0.0] * 4
    threads = [threading.Thread(target=of_rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3.5] * 4
    assert gathered[1] == ["3.5", "0.0", "0.0", "0.0"]


def test_a_round_trip_that_nobody_begins_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may have died after the meeting."""
    monkeypatch.setattr(links, "TIMEOUT_S", 0.05)
    board = SimpleNamespace(all_gather=lambda text, timeout_s: [text] * 2)
    with pytest.raises(TimeoutError):
        links.round_trip_us(world_of(2, 1, board=board), Topology((0, 1)))


def test_a_barrier_has_one_limit_for_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 comes after 8 of 10 seconds, and rank 2 never."""
    now = itertools.count(1)
    seconds = [0]

    def pause() -> None:
        seconds[0] = next(now)
        if seconds[0] == 8:
            words[world.LINE] = 1

    shared = mmap.mmap(-1, 3 * 8 * world.LINE)
    monkeypatch.setattr(world, "TIMEOUT_S", 10.0)
    monkeypatch.setattr(world, "time", SimpleNamespace(monotonic=lambda: float(seconds[0])))
    with memoryview(shared).cast("q") as words:
        barrier = world.SpinBarrier(shared, 0, 3, pause)
        with pytest.raises(PeerTimeout, match=r"rank 2 did not reach the barrier within 10 s"):
            barrier.wait()
    assert seconds[0] == 11
