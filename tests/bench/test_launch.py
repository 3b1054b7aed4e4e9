"""The launcher returns the ranks' records, and raises for each rank that did not exit successfully."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt import info
from moe_rt.errors import MissingPackage
from moe_rt.info import cores
from moe_rt.lab.bench import launch, links, world
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.launch import RankFailed, listen
from moe_rt.lab.bench.rank import Job
from moe_rt.lab.testing.programs import Program, running
from moe_rt.memory import ucx


def program(code: str) -> Program:
    return Program([sys.executable, "-c", f"import os\n{code}"], {})


@pytest.mark.parametrize(("end", "status"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
def test_a_rank_that_fails(end: str, status: int) -> None:
    with running([program("pass"), program(end)]) as processes, pytest.raises(RankFailed, match=f"status {status};"):
        listen(processes, lambda part: None)


def test_records_come_between_other_lines(capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[float] = []
    says = "print('of a library'); print('{\"progress\": 0.5}'); print('{\"record\": {\"a\": 1}}'); print('[1]')"
    with running([program(says)]) as processes:
        assert listen(processes, parts.append) == [{"a": 1}]
    assert parts == [0.5]
    assert capsys.readouterr().err == "of a library\n[1]\n"


def test_ucx_is_asked_for_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX is required before ranks start, if moe_rt takes part."""
    monkeypatch.setattr(launch, "running", lambda programs: pytest.fail("ranks were started"))
    monkeypatch.setattr(ucx, "_LIBRARY", "libnowhere.so.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    case = Case(heap="ucx", ranks=2, experts=4, topk=2, hidden=8, tokens=1)
    job = Job([case], ["memcpy", "moe_rt"], cores(), iters=1, warmup=1, seed=0, cold=False)
    with pytest.raises(MissingPackage, match=r"pip install '\.\[ucx\]'"):
        launch.launch(job, None, recycle=False, progress=lambda part: None)
    with pytest.raises(pytest.fail.Exception, match="ranks were started"):
        launch.launch(replace(job, contestants=["memcpy"]), None, recycle=False, progress=lambda part: None)


@pytest.mark.parametrize(
    ("rank", "size", "on_gpu", "expected"),
    [(1, 2, False, [11]), (3, 4, False, [10]), (0, 2, True, [10, 12]), (1, 2, True, [11]), (3, 4, True, [10])],
)
@pytest.mark.parametrize("by_mpi", [False, True])
def test_cores_of_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, size: int, on_gpu: bool, expected: list[int],
    by_mpi: bool,
) -> None:  # fmt: skip
    """A CPU rank has one core; GPU ranks share all, and each has at least one. MPI's number counts, also where its
    launcher runs as a rank of another job.
    """

    class Pinned(Exception):
        pass

    def pin(cores: list[int]) -> None:
        raise Pinned(cores)

    monkeypatch.setattr(world, "pin", pin)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.setenv("RANK", str(rank))
    if by_mpi:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        monkeypatch.setenv("RANK", "5")
    with pytest.raises(Pinned) as raised:
        world.join_processes(tmp_path, size, [10, 11, 12], on_gpu)
    assert raised.value.args == (expected,)


@pytest.mark.parametrize(("changes", "expected"), [("", "abc1234"), (" M moe_rt/info.py", "abc1234+")])
def test_the_commit_of_a_changed_tree_has_a_plus(monkeypatch: pytest.MonkeyPatch, changes: str, expected: str) -> None:
    monkeypatch.setattr(info, "_output", lambda command: "abc1234" if "rev-parse" in command else changes)
    assert info.commit() == expected


@pytest.mark.parametrize(("phase", "times"), [("forward", 1), ("", 1), ("forward+backward", 2)])
def test_a_backward_sends_as_much_again(monkeypatch: pytest.MonkeyPatch, phase: str, times: int) -> None:
    """The formula is a mean over inputs, of each node."""
    asked: list[int] = []

    def sent(case: Any, rows: Any, unit: str, times: int) -> list[Any]:
        asked.append(times)
        return [SimpleNamespace(sent=rows), SimpleNamespace(sent=10 * rows)]

    monkeypatch.setattr(links, "bytes_through", sent)
    it: Any = SimpleNamespace(_case=None, _rows=[1, 3])
    assert links.Links._formula(it, SimpleNamespace(phase=phase), "rank") == [2, 20]  # type: ignore[arg-type]
    assert asked == [times, times]
