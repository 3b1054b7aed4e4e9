"""The step of one process per GPU, rehearsed with CPU ranks: each part, its report, and the faults it detects."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.ranks import CASE_TIMEOUT_S

from moe_rt.cli import main
from moe_rt.lab.check import processes, run
from moe_rt.lab.check.steps import STEPS, Check, perform

SIZE = 2


def test_every_part() -> None:
    check = Check("cpu", nproc=SIZE, seconds=CASE_TIMEOUT_S)
    record = perform(STEPS["processes"], check)
    assert (record["result"], record["error"]) == ("ok", "")
    rounds, links, killed = check.details
    assert rounds == f"rounds: {processes.ROUNDS} rounds of {SIZE} processes equal"
    assert links.startswith("links: ")
    assert killed.startswith("killed: PeerDead ")
    (table,) = check.tables
    assert [row[0] for row in table.rows] == ["dispatch", "combine"] * len(processes.TOKENS)
    assert all(number > 0 for row in table.rows for number in row[1:4])


def test_a_copy_is_timed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks begin together, and the time is read when the device has finished. Runs to warm up do not count."""
    events: list[str] = []
    seconds = iter(float(i) for i in range(100))

    def timer() -> Any:
        timed: Any = SimpleNamespace(start=lambda: events.append("start"), stop=lambda: events.append("stop"))
        timed.seconds = lambda: events.append("read") or next(seconds)
        return timed

    monkeypatch.setattr(processes, "Timer", timer)
    monkeypatch.setattr(processes, "_finish", lambda device: events.append("finish"))
    monkeypatch.setattr(processes.dist, "barrier", lambda: events.append("barrier"))
    median = processes._median(lambda: events.append("call"), torch.device("cuda"))
    total = processes.WARM_UP + processes.RUNS
    assert events == ["barrier", "start", "call", "stop", "finish", "read"] * total
    assert median == statistics.median(range(processes.WARM_UP, total))


def test_one_process_is_skipped() -> None:
    record = perform(STEPS["processes"], Check("cpu"))
    assert record["result"] == "skipped"
    assert "--nproc 8" in record["detail"]


def test_a_process_that_lives_is_noticed() -> None:
    """A process that survives is reported: the part for a killed process expects the last one's exit status."""
    job = {"part": "rounds", "device": "cpu", "seconds": CASE_TIMEOUT_S}
    with pytest.raises(RuntimeError, match=r"rank 1 of 2: got exit status 0, expected -9"):
        processes.run_programs(processes.MODULE, job, 2, CASE_TIMEOUT_S, {1: -9})


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.torch.version, "cuda", "13.0")
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(run.torch.cuda, "init", lambda: None)
    result = CliRunner().invoke(main, ["gpucheck", "--nproc", "8"])
    assert result.exit_code == 1
    assert result.output == (
        "Error: InvalidConfig: --nproc: got 8, but torch finds 2 GPUs here; CUDA_VISIBLE_DEVICES may hide some "
        "(moe-rt docs errors#invalidconfig)\n"
    )
