"""The launcher returns the ranks' records, and raises for each rank that did not exit successfully."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest

from moe_rt.errors import MissingPackage
from moe_rt.info import cores
from moe_rt.lab.bench import launch
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
