"""Processes that gpucheck starts have the caller's environment, one deadline, and their own GPU."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_rt.lab.check import compiling, network, processes, steps
from moe_rt.lab.check.compiling import VARIANTS, Job
from moe_rt.lab.testing import programs


class Context:
    """A context of multiprocessing, whose pool runs jobs here; jobs from `late` on do not end in time."""

    def __init__(self, late: int) -> None:
        self.late, self.given, self.waited = late, (), list[float]()

    def set_forkserver_preload(self, names: list[str]) -> None: ...

    def Pool(self, *given: Any) -> Any:
        self.given = given
        return self

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *error: object) -> None: ...

    def imap(self, run: Callable[[Job], Any], jobs: list[Job]) -> Any:
        left = enumerate(jobs)

        def following(seconds: float) -> Any:
            self.waited.append(seconds)
            number, job = next(left)
            if number >= self.late:
                raise multiprocessing.TimeoutError
            return run(job)

        return SimpleNamespace(next=following)


def test_processes_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the caller's environment, of this call. The deadline is that of all jobs together."""
    context, clock = Context(late=2), iter([100.0, 101.0, 105.0, 200.0])
    monkeypatch.setattr(compiling.multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda pid: range(2))
    monkeypatch.setattr(compiling.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(compiling, "run_job", lambda job: {"kernels": job.arch})
    monkeypatch.setenv("MOE_RT_CACHE", "of this call")
    jobs = [Job(VARIANTS[0], f"sm_{n}") for n in (80, 90, 100)]
    late = {"error": "not compiled within 10 s"}
    results = list(compiling._results(jobs, 10.0))
    assert results == [(jobs[0], {"kernels": "sm_80"}), (jobs[1], {"kernels": "sm_90"}), (jobs[2], late)]
    assert context.waited == [9.0, 5.0, 0.0]
    number, take, (environment,) = context.given
    assert number == 2
    monkeypatch.setenv("MOE_RT_CACHE", "of an earlier call")
    take(environment)
    assert os.environ["MOE_RT_CACHE"] == "of this call"


class Reached(Exception):
    pass


@pytest.mark.parametrize(
    ("module", "job", "device"),
    [(network, {"heap": "nvshmem"}, "cuda:1"), (network, {"heap": "shm"}, "cpu"),
     (processes, {"part": "rounds"}, "cuda:0"), (processes, {"part": "rounds"}, "cpu")],
    ids=["network", "network on the CPU", "processes", "processes on the CPU"],
)  # fmt: skip
def test_a_process_chooses_its_gpu_first(
    monkeypatch: pytest.MonkeyPatch, module: Any, job: dict[str, str], device: str
) -> None:
    """The network step has two processes on one GPU, and the other one GPU for each; CPU ranks have none."""

    def init(*given: Any, **how: Any) -> None:
        raise Reached

    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(Reached):
        module.run_rank(device=device, rank=1, size=2, store="", seconds=1.0, **job)
    assert chosen == (["cuda:1"] if device.startswith("cuda") else [])


PROGRAMS = {
    "network": {"device": "cpu", "rank": 0, "size": 1, "store": "", "heap": "shm", "seconds": 1.0},
    "processes": {"part": "rounds", "device": "cpu", "rank": 0, "size": 1, "store": "", "seconds": 1.0},
    "child": {"step": "layer", "device": "cpu", "quick": True, "seconds": 9.0, "sizes": None, "result": "", "nproc": 1},
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("first", [True, False])
def test_a_started_program_ends_with_its_starter(monkeypatch: pytest.MonkeyPatch, name: str, first: bool) -> None:
    """It sees to that before anything else, and then does the job that it is given."""
    seen: list[Any] = []

    def reached(*given: Any, **how: Any) -> None:
        seen.append(how["rank"] if how else given[-1].device if given else "starter")
        if first or len(seen) == 2:
            raise Reached

    monkeypatch.setattr(programs, "end_with_starter", reached)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **how: reached(*given, **how))
    monkeypatch.setattr(steps, "perform", reached)
    for call in ("enable", "dump_traceback_later"):
        monkeypatch.setattr(faulthandler, call, lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["program", json.dumps(PROGRAMS[name])])
    module = f"moe_rt.lab.check.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)  # which runpy would warn about
    with pytest.raises(Reached):
        runpy.run_module(module, run_name="__main__")
    assert seen == (["starter"] if first else ["starter", "cpu" if name == "child" else 0])
