"""The picture of a layer's steps: what a rank does between, before and in its ops, on the clock of all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt.errors import Op
from moe_rt.lab.bench import trace


class Engine:
    """An engine whose ops only leave a record."""

    def __init__(self, *records: tuple[Op, int, int, int]) -> None:
        names = ("op", "announced_ns", "arrived_ns", "end_ns")
        made = iter([SimpleNamespace(**dict(zip(names, record, strict=True))) for record in records])
        self._engine = SimpleNamespace(op_record=lambda: next(made))
        self.ran: list[Any] = []

    def _run(self, op: Op, args: Any, tag: int) -> None:
        self.ran.append((op, args, tag))

    def _run_first(self, begun: Any) -> None:
        self.ran.append(("first", begun))

    def _run_second(self, begun: Any) -> None:
        self.ran.append(("second", begun))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the times that the clock shows, one after the other."""
    times: list[int] = []
    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic_ns=lambda: times.pop(0)))
    yield times
    assert times == []


def test_spans_of_whole_ops_and_of_halves(clock: list[int]) -> None:
    """A rank computes outside of ops. The second half of an op waits from its own begin, not from the announcement."""
    engine = Engine((Op.DISPATCH, 120, 150, 170), (Op.COMBINE, 205, 0, 0), (Op.COMBINE, 205, 240, 250))
    spans = trace.OpSpans(SimpleNamespace(_engine=engine))  # type: ignore[arg-type]
    clock += [100, 110, 175, 200, 207, 230, 255, 300]
    with spans.noted():
        engine._run(Op.DISPATCH, "args", 3)
        engine._run_first("begun")
        engine._run_second("begun")
    assert engine.ran == [(Op.DISPATCH, "args", 3), ("first", "begun"), ("second", "begun")]
    assert spans.spans == [
        ("compute", "compute", 100, 110),
        ("send", "dispatch", 110, 120),
        ("wait", "dispatch", 120, 150),
        ("receive", "dispatch", 150, 170),
        ("compute", "compute", 175, 200),
        ("send", "combine", 200, 205),
        ("compute", "compute", 207, 230),
        ("wait", "combine", 230, 240),
        ("receive", "combine", 240, 250),
        ("compute", "compute", 255, 300),
    ]
    assert not {"_run", "_run_first", "_run_second"} & vars(engine).keys(), "its own methods again"


def test_an_op_that_fails_leaves_the_engine_as_it_was(clock: list[int]) -> None:
    engine = Engine()
    clock += [100, 110, 120]
    with pytest.raises(StopIteration), trace.OpSpans(SimpleNamespace(_engine=engine)).noted():  # type: ignore[arg-type]
        engine._run(Op.DISPATCH, "args", 3)
    assert "_run" not in vars(engine)


def test_events_of_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last step runs; each rank has a row for each lane, in order; a file has times in microseconds."""
    ran: list[Any] = []
    other = [("wait", "combine", 2000, 5000)]
    steps: list[Any] = [SimpleNamespace(run=ran.append), SimpleNamespace(run=lambda i: ran.append(f"last {i}"))]
    world: Any = SimpleNamespace(meet=lambda cold: ran.append("meet"), gather=lambda text: [text, json.dumps(other)])
    clock = iter(range(1000, 9000, 1000))
    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic_ns=lambda: next(clock)))
    events = trace.trace_layer(world, SimpleNamespace(_engine=Engine()), steps, "moe_rt")  # type: ignore[arg-type]
    assert ran == [entry for i in range(trace.STEPS) for entry in ("meet", f"last {i}")]
    shown = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    own = [("moe_rt 0", "compute", "compute", begin, 1000) for begin in (1000, 3000, 5000)]
    assert shown == [*own, ("moe_rt 1", "wait", "combine", 2000, 3000)]
    order = [(e["pid"], e["tid"], e["args"]["sort_index"]) for e in events if e["name"] == "thread_sort_index"]
    assert order == [(f"moe_rt {rank}", lane, i) for rank in range(2) for i, lane in enumerate(trace.LANES)]
    runs = [{"case": 1, "trace": events}, {"case": 2}]
    trace.write_traces(runs, tmp_path / "trace.json")
    assert runs == [{"case": 1}, {"case": 2}]
    written = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in written] == [(1.0, 1.0), (3.0, 1.0), (5.0, 1.0), (2.0, 3.0)]
