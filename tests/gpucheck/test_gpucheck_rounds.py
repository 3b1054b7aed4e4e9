"""Compare what ranks of a step do, one after the other on made-up buffers, with a record.

After a change on purpose: python tests/gpucheck/test_gpucheck_rounds.py
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpucheck.on_record import Fakes, Named, said
from support.recorded import assert_on_record, write_record

from moe_rt.config.codec import RowFormat
from moe_rt.config.topology import Topology
from moe_rt.lab.check import correctness, failures, graphs, layers, loads, measuring, pairs, scale, timing
from moe_rt.lab.check.correctness import Case
from moe_rt.lab.check.measuring import Load
from moe_rt.lab.check.scale import Drawn
from moe_rt.lab.check.steps import Check
from moe_rt.lab.testing.rounds import Inputs

RECORD = Path(__file__).parent / "gpucheck_rounds.json"
CPU = torch.device("cpu")
GPU = Named(name="gpu", device=CPU, num_sms=4)


def ranks_in_turn(fakes: Fakes, module: Any) -> None:
    """Run the ranks of a module one after the other, on buffers that list their calls."""
    calls = fakes.calls

    class Ranks:
        def __init__(self, size: int, device: Any = "cpu", **how: Any) -> None:
            calls.append(["ThreadRanks", size, said(device), said(how)])
            self.size = size

        def run(self, work: Callable[[Any], Any], seconds: float | None = None) -> list[Any]:
            calls.append(["run", seconds])
            return [work(SimpleNamespace(rank=rank)) for rank in range(self.size)]

    class Buffer:
        def __init__(self, group: Any, **how: Any) -> None:
            calls.append(["Buffer", group.rank, said(how)])
            self.rank = group.rank
            self.spec = SimpleNamespace(num_max_tokens_per_rank=how["num_max_tokens_per_rank"], hidden=2, num_topk=3,
                                        acc_dtype=torch.float32, dtype=torch.bfloat16)  # fmt: skip

        def __str__(self) -> str:
            return f"buffer of {self.rank}"

        def __enter__(self) -> Buffer:
            return self

        def __exit__(self, *error: object) -> None:
            calls.append("exit")

        def dispatch(self, *given: Any, **how: Any) -> Any:
            calls.append(["dispatch", *map(said, given), said(how)])
            handle = Named(name="handle", num_dropped=torch.tensor(0), offs=torch.tensor([1, 7 + self.rank]))
            return torch.ones(9, 1, device="cpu"), "recv_weights", handle

        def combine(self, *given: Any) -> Any:
            calls.append(["combine", *map(said, given)])
            return "out"

        def token_window(self, tokens: int) -> Any:
            calls.append(["token_window", tokens])
            return torch.zeros(tokens, 1)

        def check(self) -> None:
            calls.append("check")

        def close(self) -> None:
            calls.append("close")

    fakes.patch.setattr(module, "ThreadRanks", Ranks)
    if hasattr(module, "Buffer"):
        fakes.patch.setattr(module, "Buffer", Buffer)


def inputs(spec: Any, tokens: list[int], seed: int, kind: str = "random") -> Inputs:
    """Return inputs of one element a row, whose value is the seed and the rank."""
    xs = [torch.full((n, 1), seed + 0.25 * rank) for rank, n in enumerate(tokens)]
    return Inputs(xs, [torch.full((n, 1), seed) for n in tokens], [x + 0.125 for x in xs])


def drawn(load: Load, seed: int, device: torch.device) -> Drawn:
    """Return inputs that do not depend on a generator, with distinct experts of each token."""
    with torch.device(device):
        tokens, ranks = torch.arange(load.tokens)[:, None], range(load.ranks)
        xs = [(torch.arange(load.hidden) / 4 + tokens + 16 * rank + 64 * seed).bfloat16() for rank in ranks]
        idx = [(tokens * 3 + torch.arange(load.topk) + rank + seed) % load.experts for rank in ranks]
    return Drawn(xs, idx, [1.0 + i / 4 for i in idx])


def rounds(fakes: Fakes) -> None:
    """Play rounds of each kind of case, with and without nodes."""
    ranks_in_turn(fakes, correctness)
    fakes(correctness, "make_inputs", inputs)
    fakes(correctness, "expect", lambda spec, given, seed, most: f"expected of {seed}")
    fakes(correctness, "make_scaled", lambda row, tokens, seed: f"scaled of {seed}")
    fakes(correctness, "play")
    fakes(correctness, "play_scaled")
    for case in (
        Case("plain"), Case("a bound", "topk", most=5, max_tokens=7, idx_dtype=torch.int32),
        Case("scaled", row=RowFormat(torch.uint8, 20, torch.float32, 2), max_tokens=6),
        Case("coded", coded=True, changes={"hidden": 16}),
    ):  # fmt: skip
        correctness.run_case(GPU, 2, case, 2, seconds=33.0)
    correctness.run_case(GPU, 3, Case("nodes"), 1, topology=Topology((0, 1, 1)))
    correctness.run_case(GPU, 1, Case("all rounds"))


def chain(fakes: Fakes) -> None:
    """Run pairs whose inputs come again, and compare every second, or the last."""
    fakes.patch.setattr(correctness, "CHECK_EVERY", 2)
    ranks_in_turn(fakes, correctness)
    fakes(correctness, "make_inputs", inputs)
    fakes(correctness, "expect_forward", lambda spec, given: (0, 0, [f"{said(x)} expected" for x in given.xs]))
    fakes(correctness, "experts", lambda rows, rank: f"experts of {rank}")
    fakes(correctness, "check_bits")
    fakes.patch.setattr(correctness, "time", SimpleNamespace(sleep=lambda s: fakes.calls.append(f"sleep {s:.4g}")))
    for pairs_of_chain in (5, 40):
        if pairs_of_chain == 40:
            fakes.patch.setattr(correctness, "CHECK_EVERY", 50)
        correctness.run_chain(GPU, pairs_of_chain, seconds=60.0)


def windows(fakes: Fakes) -> None:
    """Dispatch rows that are in a rank's own window."""
    ranks_in_turn(fakes, scale)
    fakes(scale, "make_inputs", inputs)
    right = SimpleNamespace(received=[SimpleNamespace(recv_x=torch.ones(2 + rank, 1)) for rank in range(2)])
    fakes(scale, "expect", lambda spec, given, seed: right)
    fakes(scale, "check_bits")
    scale.from_token_windows(GPU, 2)


def comparison(fakes: Fakes) -> None:
    """Compare whole rounds with torch."""
    ranks_in_turn(fakes, scale)
    fakes(scale, "check_bits")
    fakes(scale, "combined", lambda drawn, rank, load: f"combined of {rank}")
    fakes(Drawn, "of", drawn)
    load = Load(2, tokens=3, hidden=4, topk=2, experts=4)
    fakes.calls.append(scale.compare_with_torch(GPU, load, seconds=44.0))


def captures(fakes: Fakes) -> None:
    """Replay graphs of two ranks, whose hosts meet, and compare each replay."""
    ranks_in_turn(fakes, graphs)
    stream = SimpleNamespace(synchronize=lambda: fakes.calls.append("synchronize"))
    fakes.patch.setattr(torch.cuda, "current_stream", lambda device: stream)
    barrier = SimpleNamespace(wait=lambda seconds: fakes.calls.append(["meet", seconds]))
    fakes(graphs, "Barrier", barrier)
    graph = Named(name="graph", replay=lambda: fakes.calls.append("replay"), reset=lambda: fakes.calls.append("reset"))
    fakes(graphs, "capture", lambda buffer, fixed, size: (graph, [fixed[0] + 1, fixed[1], fixed[2]]))
    fakes(graphs, "make_inputs", inputs)
    fakes(graphs, "expect_forward", lambda spec, given: (0, 0, [x + 3 for x in given.xs]))
    fakes(graphs, "round_trip", lambda buffer, x, *rest: [x + 2, *rest])
    fakes(graphs, "check_bits")
    graphs.run_graph(GPU, 2, 2, seconds=30.0)


def capturing(fakes: Fakes) -> None:
    """Capture on the current stream, in a mode that other ranks' calls do not break."""

    @contextlib.contextmanager
    def graph(of: Any, **how: Any) -> Iterator[None]:
        fakes.calls.append(["graph", of, said(how)])
        yield
        fakes.calls.append("captured")

    fakes.patch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    fakes.patch.setattr(torch.cuda, "graph", graph)
    fakes.patch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    fakes.patch.setattr(gc, "collect", lambda: fakes.calls.append("collect"))
    fakes(graphs, "round_trip", ["out", "grad_x", "grad_weights"])
    for size in (1, 2):
        found = graphs.capture("buffer", [torch.ones(1), torch.ones(2), torch.ones(3)], size)  # type: ignore[arg-type]
        fakes.calls.append(list(found))


def errors(fakes: Fakes) -> None:
    """Run the trials up to the error that is expected."""
    ranks_in_turn(fakes, failures)
    fakes.clock(failures)
    fakes(failures, "_next_error", lambda buffer, seconds: f"error of {buffer.rank}")
    fakes(failures, "_await_stream_of")
    fakes(failures, "_expect")
    fakes(failures, "streams_of", lambda device, size: ["stream"])
    fakes.patch.setattr(failures, "TIMEOUT_S", 0.01)  # of waits for ranks that run in turn here
    for trial in (
        failures.late_peer,
        failures.bad_expert,
        failures.overflow,
        failures.shared_stream,
        failures.too_many_ranks,
    ):
        fakes.calls.append(trial(GPU))


def times(fakes: Fakes) -> None:
    """Time pairs with and without the profiler and replays."""
    calls = fakes.calls

    class Event:
        count = 0

        def __init__(self, enable_timing: bool) -> None:
            Event.count += 1
            self.name = f"{Event.count}{'' if enable_timing else ' without timing'}"

        def __str__(self) -> str:
            return self.name

        def record(self) -> None:
            calls.append(f"record {self.name}")

    class Profile:
        def __init__(self, **how: Any) -> None:
            calls.append(["profile", str(how)])

        def __enter__(self) -> None:
            calls.append("profile begins")

        def __exit__(self, *error: object) -> None:
            calls.append("profile ends")

        def events(self) -> list[Any]:
            return []

    ranks_in_turn(fakes, pairs)
    fakes.patch.setattr(pairs, "WARM_UP", 1)
    fakes.patch.setattr(torch.cuda, "Event", Event)
    fakes.patch.setattr(torch.profiler, "profile", Profile)
    stream = SimpleNamespace(synchronize=lambda: calls.append("synchronize"))
    fakes.patch.setattr(torch.cuda, "current_stream", lambda device: stream)
    fakes.patch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize all"))
    flush = SimpleNamespace(run=lambda: calls.append("flush"))
    fakes(measuring, "Flush", flush)
    gate = SimpleNamespace(wait=lambda: calls.append("gate"))
    fakes(pairs, "StreamGate", gate)
    hosts = SimpleNamespace(wait=lambda seconds: calls.append(["meet", seconds]))
    fakes.patch.setattr(threading, "Barrier", lambda size: hosts)
    fakes(pairs, "kernels", lambda events: ["kernel"])
    fakes(pairs, "launch_turns", lambda events, size: {"launch": [events, size]})
    fakes(pairs, "_spans", lambda points: [[[event.name for event in turn] for turn in rank] for rank in points])
    fakes(pairs, "fewest_bytes", lambda *given: list(given))
    fakes.patch.setattr(pairs.PairRank, "replayed", lambda own: (calls.append("replayed"), 0.5 + own.buffer.rank)[1])
    fakes(Drawn, "of", drawn)
    load = Load(2, tokens=3, hidden=4, topk=2, experts=4)
    for how in ({}, {"profiled": True}, {"replayed": True}):
        found = pairs.times_of(GPU, load, 1, 55.0, **how)
        calls.append([said(v) for v in (found.ops, found.launches, found.replayed, found.num_bytes)])

    def measure(own: pairs.PairRank) -> str:
        calls.append([said(t) for t in own.inputs] + [own.shared.seconds, own.shared.size])
        return "measured"

    fakes.patch.setattr(pairs, "Load", lambda ranks, tokens: Load(ranks, tokens, 4, 2, 4))
    calls.append(pairs.on_one_rank(GPU, 3, measure, 66.0))


def clocks(fakes: Fakes) -> Named:
    """Replace torch.cuda and timers by ones that list their calls; return the stream of ranks."""
    calls = fakes.calls

    class Timer:
        count = 0

        def __init__(self) -> None:
            Timer.count += 1
            self.number = Timer.count

        def start(self) -> None:
            calls.append(f"start {self.number}")

        def stop(self) -> None:
            calls.append(f"stop {self.number}")

        def seconds(self) -> float:
            calls.append(f"seconds {self.number}")
            return 1.0 + (self.number * 7) % 5

    @contextlib.contextmanager
    def graph(of: Any, **how: Any) -> Iterator[None]:
        calls.append(["graph", of.name, said(how)])
        yield

    def stream(name: str) -> Any:
        return Named(name=name, synchronize=lambda: calls.append(f"synchronize {name}"),
                     wait_stream=lambda other: calls.append(f"{name} waits for {other}"))  # fmt: skip

    made = Named(name="graph", replay=lambda: calls.append("replay"), reset=lambda: calls.append("reset"))
    patch, main, side = fakes.patch, stream("main"), stream("side")
    for module in (pairs, timing, loads, measuring):
        patch.setattr(module, "Timer", Timer)
    patch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    patch.setattr(torch.cuda, "graph", graph)
    patch.setattr(torch.cuda, "current_stream", lambda device: main)
    patch.setattr(torch.cuda, "Stream", lambda device: side)
    patch.setattr(torch.cuda, "stream", lambda to: (calls.append(f"to {to}"), contextlib.nullcontext())[1])
    patch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"synchronize {device}"))
    patch.setattr(torch, "matmul", lambda a, b, out: calls.append(f"matmul of {list(a.shape)}"))
    patch.setattr(gc, "collect", lambda: calls.append("collect"))
    patch.setattr(measuring, "Flush", lambda device: SimpleNamespace(run=lambda: calls.append("flush")))
    for module, name, value in ((pairs, "REPLAYS", 3), (pairs, "LOOPS", 3), (pairs, "PAIRS_IN_GRAPH", 2),
                                (timing, "SIDE", 4), (timing, "OVERLAP_WARM_UP", 1), (loads, "WARM_UP", 1),
                                (measuring, "_COPIED_BYTES", 100), (measuring, "_RUNS", 3),
                                (measuring, "_WARM_UP", 1)):  # fmt: skip
        patch.setattr(module, name, value)
    return main


def replays(fakes: Fakes) -> None:
    """Replay pairs in a graph of one rank, and of one of two."""
    calls, main = fakes.calls, clocks(fakes)
    buffer = SimpleNamespace(rank=0, dispatch=lambda *given: (calls.append(f"dispatch {given}"),),
                             combine=lambda *given: calls.append("combine"))  # fmt: skip
    for size in (1, 2):
        own: Any = pairs.PairRank.__new__(pairs.PairRank)
        own.buffer, own.inputs, own.stream, own.shared = buffer, ("x",), main, pairs._Shared(size, 60.0)
        own.meet = lambda: calls.append("meet")
        calls.append(own.replayed())


def overlaps(fakes: Fakes) -> None:
    """Time a pair, a product, and both on two streams."""
    clocks(fakes)
    ranks_in_turn(fakes, timing)
    few: dict[str, Any] = {"hidden": 4, "topk": 2, "experts": 4}
    fakes.patch.setattr(timing, "Load", lambda ranks, tokens, **how: Load(ranks, tokens // 1024, **few | how))
    fakes.patch.setattr(torch, "randn", lambda *shape, device: torch.ones(shape, device=device))
    fakes.patch.setattr(torch, "rand", lambda *shape, device: torch.arange(4.0, device=device).repeat(shape[0], 1))
    with torch.device("meta"):  # the default counts for nothing
        fakes.calls.append(list(timing.overlap_seconds(GPU, 8, 2, 70.0)))


def copies(fakes: Fakes) -> None:
    """Time plain copies, and torch's own permutations."""
    clocks(fakes)
    ceiling, asked = measuring.CopyCeiling(CPU), list[int]()
    with torch.device("meta"):
        fakes.calls.append([ceiling.of(n) for n in (120, 40, 1)])
    fakes.patch.setattr(Drawn, "of", staticmethod(drawn))

    class Ceiling(measuring.CopyCeiling):
        def of(self, num_bytes: int) -> float:
            asked.append(num_bytes)
            return 64.0

    with torch.device("meta"):  # the default counts for nothing
        fakes.calls.append([*loads.alternatives(CPU, Load(2, 4, 8, 2, 4), 2, Ceiling(CPU)), asked])


def host_times(fakes: Fakes) -> None:
    """Time ops from call to return, and let hosts meet."""
    calls, main = fakes.calls, clocks(fakes)
    fakes.patch.setattr(pairs, "OPS_IN_A_ROW", 2)
    fakes.patch.setattr(pairs, "LOOPS", 2)
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 26.0] * 2)
    fakes.patch.setattr(pairs, "time", SimpleNamespace(perf_counter=lambda: (calls.append("look"), next(times))[1]))
    for rank in (0, 1):
        own: Any = pairs.PairRank.__new__(pairs.PairRank)
        own.inputs, own.stream, own.shared = ("x",), main, SimpleNamespace(
            hosts=SimpleNamespace(wait=lambda seconds: calls.append(["meet", seconds])), seconds=60.0)  # fmt: skip
        own.buffer = SimpleNamespace(rank=rank, dispatch=lambda *given: (calls.append(f"dispatch {given}"), "handle"),
                                     combine=lambda *given: calls.append(f"combine {given}"))  # fmt: skip
        own.meet(lambda: calls.append("then"))
        own.meet()
        if rank == 0:
            calls.append(own.host_seconds())


def profiles(fakes: Fakes) -> None:
    """Profile a step between two times at which the device is quiet, and run a step of a layer."""
    calls = fakes.calls

    @contextlib.contextmanager
    def block(name: str, **how: Any) -> Iterator[Any]:
        calls.append([f"{name} begins", sorted(map(str, how.get("activities", ())))])
        yield SimpleNamespace(events=lambda: ["event"])
        calls.append(f"{name} ends")

    fakes.patch.setattr(torch.profiler, "profile", lambda **how: block("profile", **how))
    fakes.patch.setattr(torch.profiler, "record_function", block)
    fakes.patch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    calls.append(layers.profiled(lambda: calls.append("work")))

    class Layer:
        def zero_grad(self, **how: Any) -> None:
            calls.append(["zero_grad", how])

        def __call__(self, x: torch.Tensor) -> Any:
            calls.append(["called", x.requires_grad, x.is_leaf])
            return SimpleNamespace(backward=lambda grad: calls.append(["backward", grad])), None

    layers.step(Layer(), torch.ones(2) * 1, "grad")  # type: ignore[arg-type]


def waits(fakes: Fakes) -> None:
    """Look for waits of the host, with and without one."""
    calls = fakes.calls
    buffer = SimpleNamespace(check=lambda: calls.append("check"), close=lambda: calls.append("close"))
    fakes(layers, "make_layer", (Named(name="layer", buffer=buffer), torch.ones(2, 2)))
    fakes(layers, "step", lambda layer, x, grad: None)
    fakes.patch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    fakes(torch.cuda, "set_sync_debug_mode")
    for found in ([], ["cudaMemcpy", "cudaFree", "cudaMemcpy"]):
        fakes.patch.setattr(layers, "profiled", lambda work: [calls.append("profiled"), work()])
        fakes.patch.setattr(layers, "host_waits", lambda events, found=found: found)
        fakes.patch.setattr(layers, "kernels", lambda events: ["kernel"] * 7)
        check = Check(GPU)
        layers.check_syncfree(check)
        calls.append([check.details, [failure.splitlines()[-1] for failure in check.failures]])


PARTS: dict[str, Callable[[Fakes], None]] = {
    part.__name__: part
    for part in (
        rounds,
        chain,
        windows,
        comparison,
        captures,
        capturing,
        errors,
        times,
        replays,
        overlaps,
        copies,
        host_times,
        profiles,
        waits,
    )
}


def played(name: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        fakes = Fakes(patch)
        PARTS[name](fakes)
    return {f"{number}": call for number, call in enumerate(fakes.calls)}


@pytest.mark.parametrize("name", PARTS)
def test_what_ranks_do_is_on_record(name: str) -> None:
    assert_on_record(RECORD, name, played(name))


if __name__ == "__main__":
    write_record(RECORD, {name: played(name) for name in PARTS})
