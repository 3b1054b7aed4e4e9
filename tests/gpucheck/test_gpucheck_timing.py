"""GPU timing code, rehearsed without a GPU: the spans and bytes that count, and the meaning of the profiler's
events."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpucheck.fake_cuda_timing import SmallFlush, TimedGpu, device_event, stand_in

from moe_rt.group import thread_ranks
from moe_rt.lab.check import graphs, layers, loads, measuring, pairs, timing
from moe_rt.lab.check.layers import LayerSizes
from moe_rt.lab.check.measuring import RANGE, Load, host_waits, kernels
from moe_rt.lab.check.steps import STEPS, Check, Skipped
from moe_rt.lab.testing import rounds
from moe_rt.lab.testing.rounds import WrongOutput
from moe_rt.lab.testing.streams import StreamGate

HANG_S = 1800.0  # steps use a part of it


def small_load(ranks: int, tokens: int) -> Load:
    return Load(ranks, tokens, 64, 2, 8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> TimedGpu:
    found = TimedGpu()
    stand_in(monkeypatch, found)
    monkeypatch.setattr(measuring, "Flush", SmallFlush)
    for name, value in {"HIDDEN": 64, "EXPERTS": 8, "TOPK": 2, "WARM_UP": 1}.items():
        monkeypatch.setattr(loads, name, value)
    monkeypatch.setattr(measuring, "_COPIED_BYTES", 1 << 16)
    for name, value in {"Load": small_load, "WARM_UP": 1, "OPS_IN_A_ROW": 5}.items():
        monkeypatch.setattr(pairs, name, value)
    for step in (measuring, graphs):
        monkeypatch.setattr(step, "TIMEOUT_S", HANG_S)
    return found


def test_the_ceiling_counts_bytes_read_and_written(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of half the bytes, which takes a quarter of a second, moves four times all of them in a second."""
    times = iter([9.0] * measuring._WARM_UP + [0.25] * measuring._RUNS)
    monkeypatch.setattr(measuring.Timer, "seconds", lambda timer: next(times))
    copied: list[int] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source: copied.append(source.nbytes))
    ceiling = measuring.CopyCeiling(gpu.device)
    assert ceiling.of(1000) == 4 * 1000
    assert set(copied) == {500}
    assert ceiling.of(1000) == 4 * 1000, "it is measured once"


def test_streams_are_held_until_hosts_have_queued_what_is_timed(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which hosts issue an op is not part of its span."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("hold"))
    monkeypatch.setattr(torch.cuda.Event, "record", lambda event: seen.append("time"))
    load = timing.Load(1, tokens=4, hidden=64, topk=2, experts=4)
    pairs.times_of(gpu, load, 1, HANG_S)
    at_the_gate = ["hold", "time"]
    assert seen == [*at_the_gate, "time", "time"] * 2 * (pairs.WARM_UP + 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bandwidth_table(gpu: TimedGpu, ranks: int) -> None:
    load = timing.Load(ranks, tokens=64, hidden=64, topk=2, experts=4)
    check = Check(gpu, seconds=HANG_S)
    measured = pairs.times_of(gpu, load, runs=3, seconds=HANG_S, profiled=True)
    timing.add_measured(check, load, measured, measuring.CopyCeiling(gpu.device))
    (table,) = check.tables
    assert [row[0] for row in table.rows][-2:] == ["dispatch", "combine"]
    assert all(figure > 0 for row in table.rows for figure in row[1:6])
    assert {row[0]: row[6].split()[0] for row in table.rows if row[6]}.keys() == {
        "dispatch_receive (gather)",
        "combine_send (push)",
    }
    kept, tokens = ranks * 64 * 2, ranks * 64
    assert measured.num_bytes["dispatch_send"] == 2 * tokens * 128
    if ranks == 1:
        assert measured.num_bytes["dispatch_receive"] == (tokens + kept) * 128


def test_dropped_rows_are_no_measurement(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    load = timing.Load(2, tokens=8, hidden=64, topk=2, experts=4)
    tight = {**load.buffer_kwargs(), "capacity_factor": 0.2, "overflow": "drop"}
    monkeypatch.setattr(timing.Load, "buffer_kwargs", lambda self: tight)
    with pytest.raises(WrongOutput, match="dropped"):
        pairs.times_of(gpu, load, 3, HANG_S)


def test_overheads(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs.PairRank, "replayed", lambda rank: 1e-5)
    check = Check(gpu, seconds=HANG_S)
    timing.add_overheads(check)
    assert not check.failures
    (table,) = check.tables
    assert table.rows[0] == ["pair of 1 token in a graph", 10.0, "met (< 25)"]
    assert [row[0] for row in table.rows[1:]] == ["host time of dispatch, eager", "host time of combine, eager"]


@pytest.mark.parametrize(
    ("load", "factor", "overflow", "rooms"),
    [(Load(1), None, "raise", 1), (Load(8, 128), None, "raise", 8), (Load(8, 129), 1.5, "drop", 1.5),
     (Load(8, 129, raises=True), 1.5, "raise", 1.5)],
    ids=["one rank", "few tokens", "many tokens", "raises"],
)  # fmt: skip
def test_room_for_received_rows(load: Load, factor: float | None, overflow: str, rooms: float) -> None:
    """Few tokens may all reach one rank, so there is room for those of all ranks; else for half more than the mean."""
    given = load.buffer_kwargs()
    assert (given["capacity_factor"], given["overflow"]) == (factor, overflow)
    assert load.capacity_bytes() == rooms * load.tokens * 8 * 7168 * 2


def test_other_loads(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads cover few tokens on many ranks, few blocks, with rings and without, and capacity that raises."""
    found = timing.loads(gpu)
    assert [(load.ranks, load.tokens, load.num_sms, load.rings, load.raises) for load in found.values()] == [
        (8, 128, None, True, False),
        (8, 133, None, True, False),
        (1, 4096, 8, True, False),
        (1, 4096, 24, True, False),
        (1, 4096, None, True, False),
        (1, 4096, 8, False, False),
        (1, 4096, 24, False, False),
        (8, 4096, None, True, True),
    ]
    assert found["capacity that raises"].buffer_kwargs()["overflow"] == "raise"
    small = {name: Load(min(2, f.ranks), 8, 64, 2, 4, f.raises, f.num_sms, f.rings) for name, f in found.items()}
    monkeypatch.setattr(timing, "loads", lambda device: small)
    times_of, switches = pairs.times_of, set()

    def recorded(device: Any, load: Load, *rest: Any) -> Any:
        switches.add((load.rings, load.buffer_kwargs()["tuning"].ring_blocks > 0))
        return times_of(device, load, *rest)

    monkeypatch.setattr(timing, "times_of", recorded)
    check = Check(gpu, seconds=HANG_S)
    timing.add_loads(check, 2)
    assert not check.failures
    (table,) = check.tables
    assert [row[0] for row in table.rows] == list(small)
    assert switches == {(True, True), (False, False)}
    assert all(figure > 0 for row in table.rows for figure in row[4:])


def test_loads(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load has one row of ops, and a row for each of its launches, which begin with the op's name."""
    monkeypatch.setattr(pairs.PairRank, "replayed", lambda rank: 1e-5)
    check = Check(gpu, quick=True, seconds=HANG_S)
    loads.check(check)
    assert not check.failures
    ops, launches = check.tables
    assert [tuple(row[:2]) for row in ops.rows] == list(loads.QUICK_SIZES)
    assert all(figure > 0 for row in ops.rows for figure in row[2:7])
    assert {row[4] for row in ops.rows} == {10.0}
    assert {tuple(row[:3]) for row in launches.rows} == {
        (1, 1, "dispatch_whole"),
        (1, 1, "combine_whole"),
        *((2, 8, name) for name in measuring.ROLES),
    }
    assert all(0 < one <= together for *_, one, together in launches.rows)


def test_launches_of_all_ranks_are_one_span() -> None:
    """Warm-up rounds do not count, nor do launches of other programs."""
    events = [device_event("gemm", 0, 1000)]
    for turn in range(5 + 2):
        start = 1000.0 * turn
        events += [
            device_event("dispatch_send", start, start + 30),
            device_event("dispatch_send", start + 10, start + 60),
        ]
    (turns,) = pairs.launch_turns(events, 2).values()
    assert loads.of_launch(turns) == (pytest.approx(40e-6), pytest.approx(60e-6))


def test_copies_wait_for_their_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a GPU is copied once its stream is done: queued copies to pageable memory hold up those of peers."""
    seen: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: seen.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0", detach=lambda: on_gpu, cpu=lambda: seen.append("copy"))
    rounds.read(on_gpu)  # type: ignore[arg-type]
    assert seen == ["stream", "copy"]


def test_a_rank_runs_its_backward_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one thread for all backwards of a device, where a rank's could wait for another rank's."""
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    stream = SimpleNamespace(synchronize=lambda: None)
    with thread_ranks._on_stream("cpu", stream, reserve_bytes=0):
        assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()


def test_virtual_ranks_copy_in_one_place() -> None:
    """Other code of gpucheck that runs on virtual ranks must use `read`."""
    texts = {path.name: path.read_text() for path in Path(measuring.__file__).parent.glob("*.py")}
    texts["rounds.py"] = Path(rounds.__file__).read_text()
    found = [
        f"{name}: {line.strip()}" for name, text in texts.items() for line in text.splitlines() if ".cpu()" in line
    ]
    assert found == [
        "serving.py: expected = fused_experts(x, gate_up, down, weights, ids).cpu().float()",
        "rounds.py: return t.detach().cpu()",
    ]


def test_overlap(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "Load", lambda ranks, tokens, num_sms=None: Load(1, 8, 64, 2, 4, num_sms=num_sms))
    monkeypatch.setattr(timing, "SIDE", 16)
    check = Check(gpu, seconds=HANG_S)
    timing.add_overlap(check, 2)
    assert not check.failures
    (table,) = check.tables
    assert [row[0] for row in table.rows] == [8, 24]
    for _, alone, product, both, hidden in table.rows:
        assert hidden == pytest.approx((alone + product - both) / min(alone, product), abs=0.01)


def test_receiving_counts_from_the_end_of_sending() -> None:
    events = []
    for turn in range(pairs.WARM_UP + 3):
        for rank in range(2):
            start = 1000.0 * turn + 10 * rank
            for name, begin, end in (
                ("dispatch_send", 0, 100),
                ("dispatch_receive", 50, 250),
                ("combine_send", 300, 400),
                ("combine_receive", 400, 500),
            ):
                events.append(device_event(name, start + begin, start + end))
    times = timing.of_roles(pairs.launch_turns(events, 2))
    assert times["dispatch_send"] == pytest.approx(110e-6)
    assert times["dispatch_receive"] == pytest.approx(150e-6), "from 110 to 260"
    assert times["combine_receive"] == pytest.approx(100e-6)
    with pytest.raises(WrongOutput, match="got 15 launches of combine_receive, expected a multiple of 2"):
        pairs.launch_turns(events[:-1], 2)
    with pytest.raises(WrongOutput, match="got no launch of combine_receive"):
        timing.of_roles(pairs.launch_turns([e for e in events if e.name != "combine_receive"], 2))


def test_pulled_tokens_count_once_for_each_rank() -> None:
    idx = torch.tensor([[0, 1, 7], [4, 5, 6], [0, 3, -1]])
    assert measuring.count_pulled(idx, 8, 1) == 3
    assert measuring.count_pulled(idx, 8, 2) == 4
    assert measuring.count_pulled(idx, 8, 4) == 2 + 2 + 2


def test_copies_are_timed(gpu: TimedGpu) -> None:
    ceiling = measuring.CopyCeiling(gpu.device)
    assert ceiling.of(1 << 20) == ceiling.of(1 << 20) > 0


def test_waits_inside_the_range_are_found() -> None:
    marks = [device_event(RANGE, 10, 20, "CPU", annotation=True), device_event(RANGE, 10, 30, annotation=True)]
    work = [device_event("dispatch_send", 12, 14), device_event("cudaLaunchKernel", 11, 12, "CPU")]
    outside = [device_event("cudaDeviceSynchronize", 21, 25, "CPU")]
    assert host_waits(marks + work + outside) == []
    inside = [
        device_event("cudaStreamSynchronize", 15, 16, "CPU"),
        device_event("Memcpy DtoH (Device -> Pageable)", 1, 2),
    ]
    assert host_waits(marks + work + inside) == [e.name for e in inside]
    with pytest.raises(WrongOutput, match="CUPTI"):
        kernels(marks)


def test_syncfree_asks_the_profiler(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(layers, "LayerSizes", lambda: LayerSizes(64, 32, 8, 2, 16))
    check = Check(gpu, seconds=HANG_S)
    layers.check_syncfree(check)
    assert not check.failures
    assert modes == ["error", "default"]
    assert "no wait among 8 kernels" in check.details[-1]


@pytest.mark.parametrize("size", [1, 2])
def test_replays_are_compared(gpu: TimedGpu, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A graph that runs the round again passes; one that repeats its old outputs does not.

    A graph is reset once all ranks have met a third time: when nothing runs on the device.
    """
    meetings: Counter[int] = Counter()
    at_resets: list[int] = []

    class Meeting(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            meetings[threading.get_ident()] += 1
            return super().wait(timeout)

    def captured(stale: bool) -> Any:
        def capture(buffer: Any, fixed: list[Any], size: int) -> tuple[Any, list[Any]]:
            outputs = graphs.round_trip(buffer, *fixed)

            class Graph:
                def replay(self) -> None:
                    for old, new in zip(outputs, graphs.round_trip(buffer, *fixed), strict=True):
                        old.copy_(old if stale else new)

                def reset(self) -> None:
                    at_resets.append(meetings[threading.get_ident()])

            return Graph(), outputs

        return capture

    # Real captures do not run the round, but this stand-in does, so ranks must not wait for each other's capture.
    monkeypatch.setattr(graphs, "Lock", contextlib.nullcontext)
    monkeypatch.setattr(graphs, "Barrier", Meeting)
    monkeypatch.setattr(graphs, "capture", captured(stale=False))
    graphs.run_graph(gpu, size, 3, seconds=HANG_S)
    assert at_resets == [3] * size
    monkeypatch.setattr(graphs, "capture", captured(stale=True))
    with pytest.raises(WrongOutput, match="replay 1"):
        graphs.run_graph(gpu, size, 3, seconds=HANG_S)


@pytest.mark.parametrize(("ranks", "name", "estimated"), [(1, "H100", True), (2, "H100", False), (1, "A100", False)])
def test_only_one_rank_of_a_known_gpu_has_an_estimate(
    monkeypatch: pytest.MonkeyPatch, ranks: int, name: str, estimated: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=f"NVIDIA {name}"))
    monkeypatch.setattr(loads.estimate, "MACHINES", [SimpleNamespace(name="H100")])
    monkeypatch.setattr(loads.estimate, "op_us", lambda *given: 1.0)
    expected = len(measuring.OPS) if estimated else ""
    assert loads._estimated_us(small_load(ranks, 8), torch.device("cuda")) == expected


def test_a_part_may_skip_its_step() -> None:
    """A part that fails is recorded and the next one runs; one that is skipped is no failure."""
    check = Check("cpu")
    with check.part("fails"):
        raise ValueError
    assert len(check.failures) == 1
    with pytest.raises(Skipped), check.part("skips"):
        raise Skipped("no such GPU")
    assert len(check.failures) == 1


def test_figures_of_rows_are_exact() -> None:
    """A launch of 2 ms and 4 MB moves 2 GB in a second, half of what a copy does."""
    ceiling: Any = SimpleNamespace(of=lambda num_bytes: 1e3 * num_bytes)
    figures = ["gather", 2000.0, 4.0, 2.0, 4.0, 0.5]
    assert timing.row("gather", 2e-3, 4_000_000, ceiling, 0.5) == [*figures, "met (0.5)"]
    assert timing.row("gather", 2e-3, 4_000_000, ceiling, 0.51) == [*figures, "missed (0.51)"]
    assert timing.row("gather", 2e-3, 4_000_000, ceiling, None) == [*figures, ""]


def test_one_stream_is_timed_from_its_own_event(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            made.append(self)

        def record(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    assert [StreamGate(1, HANG_S).wait()] == made


def test_steps_are_well_formed() -> None:
    """Each names a function of its module, and a time in which it must end."""
    for step in STEPS.values():
        module, _, function = step.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), step
        assert type(step.seconds) is int, step
        assert step.title[0].isalpha(), step
