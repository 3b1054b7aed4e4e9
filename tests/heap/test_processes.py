"""Processes of ranks: the cores that they share, one watch of each, and where their numbers mean something."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moe_rt import Buffer, _engine
from moe_rt.group import board, processes
from moe_rt.group.processes import num_cores
from moe_rt.group.rendezvous import ThreadGroup

CORES = sorted(os.sched_getaffinity(0))


@contextmanager
def bound_to(*cores: int) -> Iterator[int]:
    """Yield the id of a process bound to these cores, which does nothing until it is killed."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        os.sched_setaffinity(process.pid, cores)
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(len(CORES) < 2, reason="two cores are needed to tell them apart")
def test_cores_of_all_processes_count_once() -> None:
    with bound_to(CORES[0]) as a, bound_to(CORES[0]) as b, bound_to(CORES[1]) as c, bound_to(*CORES[:2]) as d:
        assert [num_cores(pids) for pids in ([a], [a, b], [a, c], [a, d], [a, b, c, d])] == [1, 1, 2, 2, 2]


def test_all_cores_count_where_a_process_is_out_of_sight() -> None:
    with bound_to(CORES[0]) as ended:
        pass
    assert num_cores([ended]) == os.cpu_count()


def test_engine_knows_the_cores_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = _engine.Engine, []

    def engine(**config: Any) -> _engine.Engine:
        seen.append(config["num_cores"])
        return real(**config)

    monkeypatch.setattr(_engine, "Engine", engine)
    try:
        for cores in ({CORES[0]}, set(CORES)):
            os.sched_setaffinity(os.getpid(), cores)
            [group] = ThreadGroup.make(1)
            Buffer(group, num_max_tokens_per_rank=1, hidden=8, num_topk=1, num_experts=1, dtype=torch.float32).close()
    finally:
        os.sched_setaffinity(os.getpid(), CORES)
    assert seen == [1, len(CORES)]


def test_a_number_that_another_process_has_by_now_is_watched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        ended = False

        def __init__(self, pid: int) -> None:
            self.pid = pid

        def has_ended(self) -> bool:
            return self.ended

    monkeypatch.setattr(processes, "Watch", Process)
    pid = (1 << 31) - 7
    first: Any = processes.watch(pid)
    assert processes.watch(pid) is first, "all buffers share it"
    first.ended = True
    assert processes.watch(pid) is not first
    assert processes.watch(pid).has_ended() is False


def test_two_places_that_the_system_does_not_report_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: str) -> str:
        raise OSError("hidden")

    assert processes.place() == processes.place()
    monkeypatch.setattr(os, "readlink", hidden)
    one, other = processes.place(), processes.place()
    assert one["where"] != other["where"]
    assert all(each["where"].startswith(processes.UNKNOWN) for each in (one, other))


def test_when_a_process_started() -> None:
    """A record that was written before is of an earlier job."""
    before = time.time()
    with bound_to(*CORES) as pid:
        started = board._started(pid)
        assert before - 0.5 < started < time.time() + 0.5  # the system counts in hundredths of a second
    assert board.is_of_now({"since": time.time()})
    assert not board.is_of_now({"since": board._started(os.getpid()) - 1})
    assert board._started(-1) == 0.0
