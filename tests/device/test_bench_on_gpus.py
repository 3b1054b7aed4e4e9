"""`moe-rt bench` on ranks with GPUs, without a GPU: an emulated one, tensors that pass for CUDA, a fake clock."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from device.fake_cuda_tensors import DEVICE, PretendCuda, build_guard
from support.emulated_gpu import EmulatedGpu
from support.ranks import ProcessRanks, ThreadRanks

from moe_rt.buffer.buffer import Buffer
from moe_rt.cli import main
from moe_rt.group.rendezvous import StoreRendezvous
from moe_rt.info import cores
from moe_rt.lab.bench import launch
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants import base, moe
from moe_rt.lab.bench.contestants.base import Step, layer_steps
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.lab.bench.measure import measure
from moe_rt.lab.bench.rank import Job, run_case
from moe_rt.lab.bench.world import Processor, World, run_threads
from moe_rt.lab.testing import programs
from moe_rt.lab.testing.programs import Program
from moe_rt.lab.testing.streams import StreamGate
from moe_rt.ops import cuda_activation

pytestmark = pytest.mark.emulated("pretends a clock")
OPS = ("dispatch", "combine", "pair", "layer")
SIZES: dict[str, Any] = dict(tokens=12, hidden=32, experts=5, intermediate=16)
ALL = ["moe_rt", "a2a", "transformers", "mpi", "memcpy"]


def job_of(case: Case, contestants: list[str]) -> Job:
    return Job([case], contestants, cores(), iters=2, warmup=1, seed=0, cold=True)


@pytest.mark.parametrize("op", OPS)
def test_virtual_ranks(op: Any) -> None:
    """Virtual ranks run the CUDA engine, and contestants that need processes are reported absent."""
    case = Case(op=op, heap="loopback", **SIZES)
    records: list[dict[str, Any]] = []
    gpu = EmulatedGpu()
    run_threads(2, cores(), lambda world: records.append(run_case(world, job_of(case, ALL), case, print)), gpu)
    assert len(records) == 2
    phases = 2 if op == "layer" else 1
    for record in records:
        names = [n for n in ALL if n not in record["absent"] for _ in range(phases)]
        assert [(result["contestant"], result["errors"]) for result in record["results"]] == [(n, []) for n in names]
        assert record["device"] == "emulated"
        assert set(record["absent"]) == {"a2a", "transformers", "mpi"} | ({"memcpy"} if op == "layer" else set())
        assert "--heap shm, ucx, nvshmem or gin" in record["absent"]["a2a"]
        assert record["moe_rt"].keys() == {"heap_bytes", "route"}
    assert "dispatch_receive" in gpu.launched


@pytest.fixture(scope="module")
def pretenders() -> Iterator[tuple[ProcessRanks, Path]]:
    guard = build_guard()
    ranks = ProcessRanks(2)
    yield ranks, guard
    ranks.close()


@pytest.mark.parametrize("op", OPS)
def test_everything_stays_on_the_device(pretenders: tuple[ProcessRanks, Path], op: Any) -> None:
    """Everything but a layer's backward stays on the device: an op that mixed in a CPU tensor would fail, as would a
    wrong sum."""
    ranks, guard = pretenders
    case = Case(op=op, heap="nvshmem", **{**SIZES, "experts": 6})
    for record in ranks.run(pretend_case, case, guard):
        assert record["absent"].keys() == {"mpi", *(["memcpy"] if op == "layer" else [])}
        names = [n for n in ALL if n not in record["absent"]]
        assert [(result["contestant"], result["errors"]) for result in record["results"]] == [(n, []) for n in names]


def pretend_case(group: dist.ProcessGroup, case: Case, guard: Path) -> dict[str, Any]:
    """Tensors pass for CUDA tensors up to moe_rt's engine and gloo, which are those of CPU ranks."""
    cuda_activation.prepare = lambda *_: None  # would compile for the GPU
    moe.Buffer = CpuBuffer  # type: ignore[misc]
    base.layer_steps = lambda *arguments: layer_steps(*arguments)[:1]  # type: ignore[assignment]
    processor = SimpleNamespace(device=DEVICE, name="pretended", cache_bytes=1 << 10, finish=int, cool=int)
    barrier: Any = SimpleNamespace(wait=dist.barrier)
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, group, StoreRendezvous(group), barrier, processor, mpi=False)  # type: ignore[arg-type]
    with PretendCuda(guard):
        return run_case(world, job_of(case, ALL), case, print)


class CpuBuffer(Buffer):
    """A buffer on the CPU that claims the pretended device and accepts its tensors."""

    device = DEVICE  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "heap": "shm"})
        self._engine.require_call = lambda *_, **__: None  # type: ignore[method-assign]


@pytest.mark.parametrize("cold", [False, True])
def test_an_iteration_ends_when_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch, cold: bool) -> None:
    """An iteration ends when the device has finished it, and starts on an idle device, with cold caches if
    requested."""
    events: list[str] = []

    def note(event: str) -> Any:
        return lambda *_: events.append(event)

    processor: Any = SimpleNamespace(finish=note("finish"), cool=note("cool"))
    barrier: Any = SimpleNamespace(wait=note("meet"))
    board: Any = SimpleNamespace(all_gather=lambda text, timeout_s: [text])
    for module in ("measure", "world"):
        monkeypatch.setattr(f"moe_rt.lab.bench.{module}.perf_counter_ns", lambda: events.append("clock") or 0)
    world = World(0, 1, None, board, barrier, processor, mpi=False)
    measure(world, [Step(note("run"), note("check"))], 3, 0, cold, lambda part: None)
    cooled = ["cool"] if cold else []
    isolated = [*cooled, "finish", "meet", "clock", "run", "finish", "clock"]
    chain = ["finish", "meet", "clock", "run", "finish", "clock"]
    turn = ["run", *isolated, *chain]
    assert events == [*turn, *turn, "run", *isolated, "check", *chain, "check"]


def test_iterations_of_virtual_ranks_begin_when_all_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which hosts queue an iteration, one after another, is not part of it: streams are held meanwhile."""
    seen: list[list[str]] = [[], []]
    stamps = itertools.count(1)

    class Stamp:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(stamps)
            seen[here.rank].append("record")

        def wait(self) -> None:
            seen[here.rank].append("wait")

        def elapsed_time(self, later: Stamp) -> float:
            return (later.at - self.at) / 1e6

    here = threading.local()
    monkeypatch.setattr(torch.cuda, "Event", Stamp)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen[here.rank].append("hold"))
    gate, spans = StreamGate(2, 60.0), {}

    def rank_main(group: Any) -> None:
        here.rank = group.rank
        processor: Any = SimpleNamespace(finish=lambda: seen[here.rank].append("finish"))
        world = World(group.rank, 2, None, None, None, processor, mpi=False, gate=gate)  # type: ignore[arg-type]
        for turn in range(2):
            begun = world.start()
            seen[here.rank].append("run")
            spans[group.rank, turn] = (*begun, world.stop(begun))

    ThreadRanks(2).run(rank_main)
    assert seen == [["hold", "record", "wait", "wait", "record", "run", "record", "finish"] * 2] * 2
    for turn in range(2):
        (zero, begin, (start, end)), (same, _, _) = spans[0, turn], spans[1, turn]
        assert zero is same, "times of all ranks are of one clock"
        assert start == begin.at - zero.at
        assert end > start


def test_caches_are_filled_with_other_data() -> None:
    processor = Processor("cpu")
    processor.cool()
    assert processor._filler is not None
    assert processor._filler.nbytes >= 2 * processor.cache_bytes > 0
    processor.cool()
    assert bool((processor._filler == 2).all())


@pytest.mark.parametrize("heap", ["nvshmem", "loopback"])
def test_without_a_gpu_it_is_refused(heap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = CliRunner().invoke(main, ["bench", "--heap", heap, "--contestants", "moe_rt"])
    assert done.exit_code == 1
    assert f"got '{heap}' for 2 ranks and 0 GPUs, expected shm or threads" in done.stderr


def test_fewer_gpus_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = CliRunner().invoke(main, ["bench", "--heap", "nvshmem", "--contestants", "moe_rt"])
    assert done.exit_code == 1
    assert "2 ranks and 1 GPUs, expected loopback (one GPU for all ranks), shm or threads" in done.stderr


def test_mpirun_is_not_asked_to_start_ranks_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(job: Job, mpirun: str | None, recycle: bool, progress: Any) -> None:
        raise RankFailed(f"started by {mpirun}")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    monkeypatch.setattr("moe_rt.lab.bench.run.find_mpirun", lambda: "mpirun")
    monkeypatch.setattr("moe_rt.lab.bench.run.launch", launched)
    for heap, starter in {"nvshmem": None, "loopback": None, "shm": "mpirun"}.items():
        assert f"started by {starter}" in CliRunner().invoke(main, ["bench", "--heap", heap]).stderr


@pytest.mark.parametrize(("heap", "processes"), [("nvshmem", 3), ("loopback", 1)])
def test_how_ranks_are_started(heap: Any, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual ranks start in one process, whose environment lets them wait for each other on one GPU."""
    started: list[Program] = []

    def start(program: Program) -> subprocess.Popen[str]:
        started.append(program)
        return subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(programs, "start", start)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    case = Case(ranks=3, heap=heap)
    assert launch.launch(job_of(case, ["moe_rt"]), None, recycle=False, progress=print) == []
    assert len(started) == processes
    for rank, program in enumerate(started):
        assert list(program.command[1:3]) == ["-m", "moe_rt.lab.bench.rank"]
        assert program.environment.get("RANK", "0") == str(rank)
        assert ("CUDA_DEVICE_MAX_CONNECTIONS" in program.environment) == (heap == "loopback")


def test_more_rows_than_a_shared_gpu_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks' rows are on one GPU, which is said before any rank starts."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
    words = ["bench", "--heap", "loopback", "--case", "deepseek-v3-prefill", "--contestants", "moe_rt"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "8 ranks on one GPU that need 168.0 GiB for rows, expected at most the 80.0 GiB" in result.output
