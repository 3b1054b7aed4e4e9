"""A picture of a layer's steps for Perfetto: what each rank sends, waits for, receives and computes, and when.

Ranks share a clock: they are on one host, also if emulated nodes separate them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_rt.buffer.buffer import Buffer
from moe_rt.errors import Op
from moe_rt.lab.bench.contestants.base import Step
from moe_rt.lab.bench.world import World

STEPS = 3
LANES = ("send", "wait", "receive", "compute")  # from top to bottom
Span = tuple[str, str, int, int]  # lane, name, begin and end in ns


class OpSpans:
    """Notes when a buffer's ops, or their halves, begin and end.

    Attributes:
        spans: those seen so far. A rank computes while it is in no op.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._engine: Any = buffer._engine
        self.spans: list[Span] = []
        self._left = 0  # when this rank left its last op

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the ops of this block."""
        engine, whole = self._engine, self._engine._run
        first, second = engine._run_first, engine._run_second
        engine._run = lambda op, *given: self._note(lambda: whole(op, *given))
        engine._run_first = lambda begun: self._note(lambda: first(begun), receives=False)
        engine._run_second = lambda begun: self._note(lambda: second(begun), sends=False)
        self._left = time.monotonic_ns()
        try:
            yield
        finally:
            self.spans.append(("compute", "compute", self._left, time.monotonic_ns()))
            for name in ("_run", "_run_first", "_run_second"):
                delattr(engine, name)

    def _note(self, call: Callable[[], None], sends: bool = True, receives: bool = True) -> None:
        came = time.monotonic_ns()
        call()
        record = self._engine._engine.op_record()
        name, announced = Op(record.op).name.lower(), record.announced_ns
        self.spans.append(("compute", "compute", self._left, came))
        if sends:
            self.spans.append(("send", name, came, announced))
        if receives:
            self.spans.append(("wait", name, max(came, announced), record.arrived_ns))
            self.spans.append(("receive", name, record.arrived_ns, record.end_ns))
        self._left = time.monotonic_ns()


def trace_layer(world: World, buffer: Buffer, steps: Sequence[Step], name: str) -> list[dict[str, Any]]:
    """Run a few of the last one of the steps. Return the events of all ranks in Chrome's format.

    Times are in ns, as integers: floats of a document are rounded.
    """
    ops = OpSpans(buffer)
    for i in range(STEPS):
        world.meet(False)
        with ops.noted():
            steps[-1].run(i)
    events: list[dict[str, Any]] = []
    for rank, text in enumerate(world.gather(json.dumps(ops.spans))):
        events.append(dict(name="process_name", ph="M", pid=f"{name} {rank}", args={"name": f"rank {rank}, {name}"}))
        for lane in LANES:
            place = {"pid": f"{name} {rank}", "tid": lane}
            events.append(dict(name="thread_sort_index", ph="M", args={"sort_index": LANES.index(lane)}, **place))
            for _, what, begin, end in (span for span in json.loads(text) if span[0] == lane):
                events.append(dict(name=what, ph="X", ts=begin, dur=end - begin, **place))
    return events


def write_traces(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the events of all runs to a file that https://ui.perfetto.dev opens, and take them from the runs."""
    events = [event for run in runs for event in run.pop("trace", [])]
    for event in events:
        event.update({name: event[name] / 1e3 for name in ("ts", "dur") if name in event})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
