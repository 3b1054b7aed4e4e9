"""Long waits: signals are handled, lanes sleep, a frozen job resumes, and every timeout is possible."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CPU_HEAPS, HEAPS
from faults import cases_waiting as cases
from faults.cases_faults import good_round, open_buffer
from support.ranks import ProcessRanks, Ranks

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(("at", "num_threads"), [("dispatch", 1), ("combine", 3), ("backward", 1)])
def test_interrupt_ends_a_wait(make_ranks: MakeRanks, tmp_path: Path, at: str, num_threads: int) -> None:
    texts = make_ranks("shm", 2).run(cases.interrupted_at, at, num_threads, str(tmp_path))
    first, then = texts[0].split(" | then ")
    assert first == "KeyboardInterrupt: ", texts
    assert then.startswith("GroupPoisoned: "), texts
    assert "on rank 0: a signal handler raised in this op" in then, texts
    assert texts[1].startswith("GroupPoisoned: "), texts
    assert "rank 0 failed first: a signal handler raised in its wait" in texts[1], texts


@pytest.mark.parametrize("raises", [False, True])
def test_handler_of_the_user_runs_in_a_wait(make_ranks: MakeRanks, tmp_path: Path, raises: bool) -> None:
    texts = make_ranks("shm", 2).run(cases.handled, raises, str(tmp_path))
    if raises:
        assert texts[0] == "Alarm: enough"
        assert texts[1].startswith("GroupPoisoned: "), texts
    else:
        assert texts == ["no error"] * 2


def test_wait_in_the_main_thread_beside_a_busy_one() -> None:
    """The main thread checks for signals, and so takes the GIL, while the rank it waits for runs Python."""
    groups = ThreadGroup.make(2)

    def late() -> None:
        with open_buffer(groups[1]) as buffer:
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                pass
            good_round(buffer)

    thread = threading.Thread(target=late)
    thread.start()
    with open_buffer(groups[0]) as buffer:
        good_round(buffer)
    thread.join()


def test_peer_that_announces_while_the_time_runs_out() -> None:
    """An op completes if its peer announces while signals are handled, between the expiry of the timeout and the last
    check."""
    groups, go, announced = ThreadGroup.make(2), threading.Event(), threading.Event()
    waiting: list[Buffer] = []

    def only_dispatch(group: ThreadGroup, before: Callable[[Buffer], object]) -> None:
        with open_buffer(group, timeout_s=0.5) as buffer:
            before(buffer)
            idx = torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
            buffer.dispatch(torch.randn(4, buffer.spec.hidden), idx, torch.ones(idx.shape))
            announced.set()
            go.wait(cases.PATIENCE_S)

    def every_10_ms(buffer: Buffer) -> None:
        waiting.append(buffer)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)

    def handler(*_: object) -> None:
        if any(op.phase == "wait" for op in waiting[0].report().ranks[0].last_ops):
            signal.setitimer(signal.ITIMER_REAL, 0)
            go.set()
            announced.wait(cases.PATIENCE_S)

    earlier = signal.signal(signal.SIGALRM, handler)
    thread = threading.Thread(target=only_dispatch, args=(groups[1], lambda _: go.wait(cases.PATIENCE_S)))
    thread.start()
    try:
        only_dispatch(groups[0], every_10_ms)
        assert announced.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
        go.set()
        thread.join()


def test_job_that_was_frozen_goes_on(tmp_path: Path) -> None:
    """A job resumes after all ranks were stopped for longer than timeout_s and woken one by one."""
    ranks, timeout_s = ProcessRanks(3), 10.0
    texts: list[str] = []
    test = threading.Thread(
        target=lambda: texts.extend(ranks.outcomes(cases.frozen_together, timeout_s, str(tmp_path)))
    )
    test.start()
    for rank in range(3):
        cases.wait_for(str(tmp_path / str(rank)))
    time.sleep(0.5)  # let them start waiting
    for pid in ranks.pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(timeout_s + 2.0)
    for pid in ranks.pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    (tmp_path / "thawed").touch()
    test.join()
    ranks.close()
    assert texts == ["no error"] * 3


def test_lanes_sleep_while_one_waits(make_ranks: MakeRanks) -> None:
    """Lanes sleep during a wait; spinning lanes would take cores that the late rank may need."""
    cpu, wall = make_ranks("shm", 2).run(cases.wait_with_lanes, 2.0)[0]
    assert cpu < 0.4 * wall


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_bits_with_flushed_denormals_do_not_depend_on_lanes(make_ranks: MakeRanks, heap: str) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormals")
    one, four = (make_ranks(heap, 2).run(cases.flushed, num_threads) for num_threads in (1, 4))
    assert one == four
    assert all(not any(output) for outputs in one for output in outputs), "every value is flushed"


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 1e10])
@pytest.mark.parametrize("heap", HEAPS)
def test_timeout_longer_than_clocks_count(make_ranks: MakeRanks, heap: str, timeout_s: float) -> None:
    assert make_ranks(heap, 2).run(cases.waits_for_ever, timeout_s) == ["no error"] * 2


@pytest.mark.parametrize("seconds", [math.nan, 0.0, -1.0, -math.inf])
@pytest.mark.parametrize("name", ["timeout_s", "init_timeout_s"])
def test_timeout_that_makes_no_sense(name: str, seconds: float) -> None:
    with pytest.raises(InvalidConfig, match="expected positive seconds"):
        open_buffer(ThreadGroup.make(1)[0], **{name: seconds})
