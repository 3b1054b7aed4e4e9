"""Processes that gpucheck starts: what they are given, what they do in which order, and how their end is reported."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_rt.group.thread_ranks import ENVIRONMENT
from moe_rt.lab.check import child, emulated, network, processes, sanitizing
from moe_rt.lab.check.measuring import Load
from moe_rt.lab.check.steps import STEPS, Check
from moe_rt.lab.testing.programs import ONE_HOST, Program
from moe_rt.lab.testing.rounds import WrongOutput, make_spec
from moe_rt.memory import nvshmem

JOB = {"step": "layer", "device": "cuda:1", "quick": True, "seconds": 40.5, "sizes": [1, 2], "result": "r", "nproc": 3}


def note(seen: list[Any], what: Any, result: Any = None) -> Any:
    """Append to a list and return a result."""
    seen.append(what)
    return result


def job_of(command: list[str]) -> Any:
    assert command[:3] == [sys.executable, "-m", "moe_rt.lab.check.child"]
    return json.loads(command[3])


def test_the_command_of_a_step() -> None:
    how: dict[str, Any] = dict(quick=True, seconds=40.5, sizes=(1, 2), result=Path("r"))
    assert job_of(child.child_command("layer", "cuda:1", nproc=3, **how)) == JOB
    assert job_of(child.child_command("layer", "cuda:1", **how)) == {**JOB, "nproc": 1}


@pytest.mark.parametrize("name", ["layer", "correctness"])
def test_a_step_in_a_child_has_the_options_of_its_check(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Virtual ranks need variables; findings are kept in a directory that goes when the step has ended."""
    check = Check("cuda:1", True, 40.5, (1, 2), 3)
    seen: list[Path] = []

    def run_command(command: list[str], seconds: float, environment: Any) -> tuple[bool, str]:
        job = job_of(command)
        result = Path(job.pop("result"))
        assert {**job, "result": "r"} == {**JOB, "step": name}
        assert seconds == 40.5
        assert environment == (ENVIRONMENT if name == "correctness" else {})
        assert result.name == "result.json"
        assert (result.parent.parent, result.parent.name.startswith(f"unfinished_{name}_")) == (tmp_path, True)
        result.write_text(json.dumps({"result": "ok", "error": "", "tables": [1]}))
        seen.append(result)
        return True, "words"

    monkeypatch.setattr(child, "run_command", run_command)
    assert child.run_in_child(STEPS[name], check, tmp_path) == {"result": "ok", "error": "", "tables": [1]}
    assert len(seen) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ended", "why"), [(True, "the process ended"), (False, "no end within 40 s")])
@pytest.mark.parametrize("found", [None, {"result": "running", "error": "part: it failed", "tables": [1]}])
def test_a_child_without_a_result_has_failed(ended: bool, why: str, found: Any, monkeypatch: Any) -> None:
    """Its record has earlier findings, and its last words."""

    def run_command(command: list[str], *rest: Any) -> tuple[bool, str]:
        if found is not None:
            Path(job_of(command)["result"]).write_text(json.dumps(found))
        return ended, "a" * 9 + "b" * 6000

    monkeypatch.setattr(child, "run_command", run_command)
    record = child.run_in_child(STEPS["layer"], Check("cuda:1", seconds=40.4))
    said = f"{why}; it wrote\n" + "b" * 6000
    if found is None:
        assert record == {**Check("").record("layer", "failed", 0.0), "error": said}
    else:
        assert record == {"result": "failed", "error": f"part: it failed\n{said}", "tables": [1]}


def test_output_that_is_no_text() -> None:
    code = "import os, sys; os.write(1, b'\\xff' + os.environ['X'].encode()); os.write(2, b'err'); sys.exit(3)"
    assert child.run_command([sys.executable, "-c", code], 60, {"X": "y"}) == (True, "\ufffdyerr")


class Ended(Exception):
    pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what a child does to its process, in order."""
    seen: list[Any] = []

    def end(status: int) -> None:
        seen.append(("exit", status))
        raise Ended

    for name in ("enable", "dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faulthandler, name, lambda *given, name=name: seen.append((name, *given)))
    monkeypatch.setattr(child, "end_with_starter", lambda: seen.append("end with starter"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(("set_device", device)))
    monkeypatch.setattr(emulated, "prepare", lambda step: note(seen, ("prepare", step), f"gpu for {step}"))
    monkeypatch.setattr(os, "_exit", end)
    return seen


@pytest.mark.parametrize(
    ("device", "has_gpu", "chosen", "given"),
    [("cuda:1", True, [("set_device", "cuda:1")], "cuda:1"), ("cpu", False, [], "cpu"),
     (emulated.DEVICE, True, [("prepare", "layer")], "gpu for layer")],
)  # fmt: skip
@pytest.mark.parametrize(("seconds", "dumped_at"), [(40.5, 37.5), (3.5, 1.0)])
def test_what_a_child_does(
    calls: list[Any], device: str, has_gpu: bool, chosen: list[Any], given: str, seconds: float, dumped_at: float,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It chooses its GPU, and writes what it has found so far, then its record; it dumps stacks before its end."""
    result = tmp_path / "result.json"

    def perform(step: Any, check: Check) -> dict[str, Any]:
        calls.append((step.name, check.device, check.quick, check.seconds, check.sizes, check.nproc))
        assert not result.exists()
        check.say("found")
        partial = json.loads(result.read_text())
        assert partial == {**Check("").record("layer", "running", 0.0), "detail": "found"}
        return {"step": "layer", "result": "ok"}

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: calls.append("flush")))
    monkeypatch.setattr(child, "perform", perform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(Ended):
        child.main({**JOB, "device": device, "seconds": seconds, "result": str(result)})
    assert calls == [
        "end with starter",
        ("enable",),
        ("dump_traceback_later", dumped_at),
        *chosen,
        ("layer", given, True, seconds - 6.0, (1, 2), 3),
        ("cancel_dump_traceback_later",),
        "flush",
        ("exit", 0),
    ]
    assert json.loads(result.read_text()) == {"step": "layer", "result": "ok"}
    assert list(tmp_path.iterdir()) == [result]


def test_a_child_without_sizes(calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "perform", lambda step, check: note(calls, check.sizes, {}))
    with pytest.raises(Ended):
        child.main({**JOB, "device": "cpu", "sizes": None, "result": str(tmp_path / "r.json")})
    assert None in calls


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return programs that were to be started, how long each was waited for, and how they end."""
    clock = iter(float(n) for n in range(100, 200))
    found = SimpleNamespace(programs=[], waited=[], ends=[], wrote="")

    @contextlib.contextmanager
    def running(programs: list[Program]) -> Iterator[list[int]]:
        found.programs = programs
        for number, program in enumerate(programs):
            program.output.write(f"{found.wrote} of {number}")
            program.output.flush()
        yield list(range(len(programs)))

    def wait(process: int, seconds: float) -> Any:
        found.waited.append(seconds)
        return found.ends[process]

    monkeypatch.setattr(network, "running", running)
    monkeypatch.setattr(network, "wait", wait)
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of the user")
    return found


def test_ranks_that_are_processes(started: SimpleNamespace) -> None:
    """Each has the job, its rank and a store of all; variables of the user count more. One deadline is for all."""
    started.ends, started.wrote = [0, -9], "x" * 5000
    texts = network.run_programs("a.module", {"part": "p"}, 2, 1.5, {1: -9})
    assert texts == [("x" * 5000 + f" of {rank}")[-4000:] for rank in range(2)]
    assert started.waited == [0.5, 0.0]
    jobs = []
    for program in started.programs:
        assert program.command[:3] == [sys.executable, "-m", "a.module"]
        assert program.environment == {
            **ONE_HOST, "NVSHMEM_REMOTE_TRANSPORT": "none", **os.environ, "GLOO_SOCKET_IFNAME": "of the user",
        }  # fmt: skip
        assert program.errors == subprocess.STDOUT
        jobs.append(json.loads(program.command[3]))
    (store,) = {job.pop("store") for job in jobs}
    assert store.endswith("/store")
    assert jobs == [{"part": "p", "size": 2, "rank": rank} for rank in range(2)]


@pytest.mark.parametrize(
    ("ends", "statuses", "said"),
    [
        ([0, 1, None], {}, "rank 1 of 3: got exit status 1, expected 0; it wrote\nwords of 1"),
        ([None, 1, 0], {}, "rank 0 of 3: got exit status no end within 8 s, expected 0; it wrote\nwords of 0"),
        ([0, 0, 0], {2: -9}, "rank 2 of 3: got exit status 0, expected -9; it wrote\nwords of 2"),
    ],
)
def test_the_first_rank_that_fails_is_quoted(
    started: SimpleNamespace, ends: list[Any], statuses: dict[int, int], said: str
) -> None:
    started.ends, started.wrote = ends, "words"
    with pytest.raises(RuntimeError) as raised:
        network.run_programs("a.module", {}, 3, 8.4, statuses)
    assert str(raised.value) == said


def test_processes_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's last line is the result; only the part that kills the last process expects it to be killed."""
    asked: list[Any] = []

    def run_programs(*given: Any) -> list[str]:
        asked.append(given)
        return ['a warning\n{"read": 3}\n', "other"]

    monkeypatch.setattr(processes, "run_programs", run_programs)
    for name in processes.PARTS:
        assert processes.run_part(name, "cuda", 3, 50.0) == {"read": 3}
        statuses = {2: -signal.SIGKILL} if name == "killed" else {}
        job = {"part": name, "device": "cuda", "seconds": 50.0}
        assert asked.pop() == ("moe_rt.lab.check.processes", job, 3, 50.0, statuses)
    assert list(processes.PARTS) == ["rounds", "speed", "killed"]
    monkeypatch.setattr(network, "run_programs", run_programs)
    network.run_processes("cuda:0", 2, "nvshmem", 50.0)
    job = {"device": "cuda:0", "heap": "nvshmem", "seconds": 50.0}
    assert asked.pop() == ("moe_rt.lab.check.network", job, 2, 50.0, {})


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a group of this process as rank 1 of 2, and list what is done with it and its buffers."""
    seen: list[Any] = []

    class Buffer:
        def __init__(self, of: Any, **how: Any) -> None:
            seen.append(("Buffer", how))

        def __enter__(self) -> Buffer:
            return self

        def __exit__(self, *error: object) -> None:
            seen.append("close")

        def check(self) -> None:
            seen.append("check")

    found = SimpleNamespace(size=lambda: 2, rank=lambda: 1, seen=seen)
    for module in (network, processes):
        monkeypatch.setattr(module, "Buffer", Buffer)
        monkeypatch.setattr(module, "make_inputs", lambda spec, tokens, seed: note(seen, (tokens, seed), seed))
        monkeypatch.setattr(module, "expect", lambda spec, inputs, seed: ("expected", inputs, seed))
        monkeypatch.setattr(
            module, "play", lambda buffer, inputs, right, device, tag: seen.append((inputs, right, str(device), tag))
        )
        monkeypatch.setattr(module, "StoreRendezvous", lambda world: world)
    monkeypatch.setattr(nvshmem, "shutdown", lambda world, seconds: seen.append((world is found, seconds)))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=found))
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **how: seen.append((*given, how)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append("destroy"))
    monkeypatch.setattr(dist, "barrier", lambda: seen.append("barrier"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(("set_device", str(device))))
    return found


def joined(rank: int, seconds: float) -> tuple[Any, ...]:
    how = {"init_method": "file:///store", "rank": rank, "world_size": 2, "timeout": timedelta(seconds=seconds)}
    return "gloo", how


@pytest.mark.parametrize(("heap", "device"), [("nvshmem", "cuda:1"), ("shm", "cpu")])
def test_a_rank_of_the_network_step(group: SimpleNamespace, heap: str, device: str) -> None:
    """It plays three rounds, and shuts NVSHMEM down if that was its heap."""
    network.run_rank(device=device, rank=1, size=2, store="/store", heap=heap, seconds=9.0)
    options = {"heap": heap, "timeout_s": 20.0, "init_timeout_s": 9.0, **make_spec(2).arguments()}
    rounds = [
        each
        for turn in range(3)
        for each in (([12, 7], 40 + turn), (40 + turn, ("expected", 40 + turn, turn), device, turn))
    ]
    chosen, ended = ([("set_device", device)], [(True, 9.0)]) if heap == "nvshmem" else ([], [])
    tail = ["check", "barrier", "close", *ended, "destroy"]
    assert group.seen == [*chosen, joined(1, 9.0), ("Buffer", options), *rounds, *tail]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("part", ["rounds", "killed"])
def test_a_process_of_a_gpu(
    group: SimpleNamespace, part: str, device: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """It prints its findings. After the part that has killed a process it ends without shutting anything down."""

    def end(status: int) -> None:
        group.seen.append(("exit", status))
        raise Ended

    def work(world: Any, where: torch.device, options: dict[str, Any]) -> str:
        group.seen.append((world is group, str(where), options))
        return "found"

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setitem(processes.PARTS, part, work)
    with pytest.raises(Ended) if part == "killed" else contextlib.nullcontext():
        processes.run_rank(part=part, device=device, rank=1, size=2, store="/store", seconds=9.0)
    assert capsys.readouterr().out == '"found"\n'
    on_gpu = device == "cuda"
    where = "cuda:1" if on_gpu else "cpu"
    options = {"heap": "nvshmem" if on_gpu else "shm", "init_timeout_s": 9.0}
    ended = [("exit", 0)] if part == "killed" else [*([(True, 9.0)] if on_gpu else []), "destroy"]
    chosen = [("set_device", where)] if on_gpu else []
    assert group.seen == [*chosen, joined(1, 9.0), (True, where, options), *ended]


def test_rounds_of_processes(group: SimpleNamespace) -> None:
    """Numbers of tokens differ by rank and round."""
    assert processes.rounds(group, torch.device("cpu"), {"heap": "shm"}) == "3 rounds of 2 processes equal"
    options = {"heap": "shm", "timeout_s": 20.0, **make_spec(2).arguments()}
    tokens = ([0, 5], [1, 6], [2, 7])
    rounds = [
        each
        for turn in range(3)
        for each in ((tokens[turn], 40 + turn), (40 + turn, ("expected", 40 + turn, turn), "cpu", turn))
    ]
    assert group.seen == [("Buffer", options), *rounds, "check", "barrier", "close"]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_speeds_that_are_measured(group: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU ranks rehearse with few tokens; bandwidths have four digits."""
    sizes: list[Load] = []
    monkeypatch.setattr(processes, "pairs", lambda of, device, options, load: note(sizes, load, [[load.tokens]]))
    monkeypatch.setattr(processes, "ceiling", lambda of, device, way: {"read": 123.4567e9, "write": 2e9}[way])
    found = processes.speed(group, torch.device(kind), {})
    tokens = [1, 128, 133, 4096] if kind == "cuda" else [1, 16, 16, 16]
    assert found == {"ops": [[n] for n in tokens], "read": 123.5, "write": 2.0}
    assert sizes == [Load(2, n) if kind == "cuda" else Load(2, n, 64, 2, 8) for n in tokens]


@pytest.mark.parametrize("way", ["read", "write"])
def test_copies_between_peers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank copies from, or to, all others together."""
    copied: list[Any] = []

    def median(call: Any, device: torch.device) -> float:
        call()
        return 0.5

    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source, non_blocking: copied.append((to, source)))
    monkeypatch.setattr(processes, "_median", median)
    monkeypatch.setattr(processes, "slowest", lambda seconds: 4 * seconds)
    made: list[Any] = []
    ones = torch.ones

    def kept(*given: Any, **how: Any) -> torch.Tensor:
        made.append(ones(*given, **how))
        return made[-1]

    monkeypatch.setattr(torch, "ones", kept)
    group: Any = SimpleNamespace(size=lambda: 4, rank=lambda: 2)
    assert processes.ceiling(group, torch.device("meta"), way) == 3 * (1 << 16) / 2.0
    here, there = made[:3], made[3:]
    to, source = (here, there) if way == "read" else (there, here)
    assert len(there) == 3
    assert all(a is b and c is d for (a, c), b, d in zip(copied, to, source, strict=True))
    assert all((t.nbytes, t.device.type) == (1 << 16, "meta") for t in made)


def test_ranks_meet_before_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer times one turn; turns that warm up do not count."""
    seen: list[str] = []
    clock = SimpleNamespace(now=0.0)
    durations = iter([9.0] * 5 + [3.0] * 11 + [1.0] * 9)

    def call() -> None:
        seen.append("call")
        clock.now += next(durations)

    monkeypatch.setattr(dist, "barrier", lambda: seen.append("barrier"))
    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    assert processes._median(call, torch.device("cpu")) == 3.0
    assert seen == ["barrier", "call"] * 25


def test_a_gpu_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    timer = SimpleNamespace(start=lambda: seen.append("start"), stop=lambda: seen.append("stop"), seconds=lambda: 2.0)
    monkeypatch.setattr(processes, "Timer", lambda: timer)
    monkeypatch.setattr(dist, "barrier", lambda: seen.append("barrier"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(str(device)))
    assert processes._median(lambda: seen.append("call"), torch.device("cuda", 1)) == 2.0
    assert seen == ["barrier", "start", "call", "stop", "cuda:1"] * 25


def test_the_command_under_a_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the quick step of one rank, with all of its processes and the tool's variables."""
    clean, log = "========= ERROR SUMMARY: 0 errors\n", "x" * 5000
    answers: dict[str, tuple[bool, str, str]] = {
        "fine": (True, clean, '{"result": "ok"}'),
        "failed": (True, clean + log, '{"result": "failed"}'),
        "killed": (True, clean + log, ""),
        "late": (False, log, '{"result": "ok"}'),
    }
    asked: list[Any] = []

    def run_command(command: list[str], seconds: float, environment: Any) -> tuple[bool, str]:
        assert command[1:3] == ["--target-processes", "all"]
        job = job_of(command[3:])
        result = Path(job.pop("result"))
        asked.append((job, seconds, environment))
        ended, wrote, text = answers[command[0]]
        if text:
            result.write_text(text)
        return ended, wrote

    monkeypatch.setattr(sanitizing, "run_command", run_command)
    assert sanitizing.sanitize(["fine"], "cuda:1", 30.5) == "ERROR SUMMARY: 0 errors"
    job = {"step": "correctness", "device": "cuda:1", "quick": True, "seconds": 30.5, "sizes": [1], "nproc": 1}
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    assert asked == [(job, 30.5, variables)]
    failed = "the step failed under the tool, whose summary is 'ERROR SUMMARY: 0 errors':\n" + "x" * 4000
    said = {"failed": failed, "killed": failed, "late": "got no end within 30 s; last words:\n" + "x" * 4000}
    for name, message in said.items():
        with pytest.raises(WrongOutput) as raised:
            sanitizing.sanitize([name], "cuda:1", 30.4)
        assert str(raised.value) == message


def test_what_a_sanitizer_says() -> None:
    """The last of several summaries counts; with errors, all of them and the tool's first lines are quoted."""
    raced = "RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"
    lines = [f"========= {n}" for n in range(70)]
    log = "\n".join(["other", *lines, "ERROR SUMMARY: 1 error", raced])
    with pytest.raises(WrongOutput) as raised:
        sanitizing.judge(log)
    assert str(raised.value) == f"ERROR SUMMARY: 1 error; {raced}:\n" + "\n".join(lines[:60])
    warned = raced.replace("1 error,", "0 errors,")
    assert sanitizing.judge(f"ERROR SUMMARY: 0 errors\n{warned}") == warned
    with pytest.raises(WrongOutput) as raised:
        sanitizing.judge("y" + "x" * 4000)
    assert str(raised.value) == "got no summary of the tool, expected one:\n" + "x" * 4000


def test_where_the_sanitizer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for on PATH, then in the toolkit."""
    tool = tmp_path / "bin" / sanitizing.TOOL
    tool.parent.mkdir()
    tool.touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert sanitizing.find_tool() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitizing.find_tool() == str(tool)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", str(tool.parent))
    assert sanitizing.find_tool() == str(tool)
