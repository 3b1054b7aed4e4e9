"""Signals end programs by exceptions, ignored ones stay ignored, and ranks leave Ctrl-C to their program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt import faults
from moe_rt.lab.chaos import worker
from moe_rt.lab.chaos.rank_pool import STORE, RankPool
from moe_rt.lab.testing.endings import Signals

PATIENCE_S = 600.0
RAISED = {
    signal.SIGTERM: (SystemExit, str(128 + signal.SIGTERM)),
    signal.SIGHUP: (SystemExit, str(128 + signal.SIGHUP)),
    signal.SIGINT: (KeyboardInterrupt, ""),
}


def not_caught(number: int, frame: object) -> None:
    raise AssertionError("it would end the process")


@contextlib.contextmanager
def handled_by(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) == handler, "it is given back"
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", RAISED)
def test_a_signal_raises(number: signal.Signals) -> None:
    error, text = RAISED[number]
    with handled_by(number, not_caught), pytest.raises(error) as raised, Signals():
        signal.raise_signal(number)
    assert str(raised.value) == text


@pytest.mark.parametrize("number", RAISED)
def test_a_signal_that_is_held_raises_once_afterwards(number: signal.Signals) -> None:
    reached = []

    def hold(signals: Signals) -> None:
        with signals.held():
            with signals.held():
                signal.raise_signal(number)
            reached.append("the end of the inner context")

    with handled_by(number, not_caught), Signals() as signals:
        with pytest.raises(RAISED[number][0]):
            hold(signals)
        with signals.held():
            reached.append("a later one")
    assert len(reached) == 2


@pytest.mark.parametrize("number", RAISED)
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    with handled_by(number, signal.SIG_IGN), Signals() as signals, signals.held():
        signal.raise_signal(number)


def test_ctrl_c_is_left_to_the_program_that_starts_ranks() -> None:
    """A terminal sends SIGINT to the store and to ranks between sessions as well; they work on."""
    with RankPool(2) as pool:
        for _ in range(2):
            pool.session(range(2), 2)
            reports = pool.reports(range(2), PATIENCE_S)
            assert [report["raised"] for report in reports.values()] == ["nothing"] * 2
            for rank in (STORE, 0, 1):
                pool.send_signal(rank, signal.SIGINT)
            pool.send(STORE, b"")
            assert int(pool.receive(STORE, PATIENCE_S)) == 0


def test_a_rank_ignores_ctrl_c_before_its_first_session(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def look(*given: object) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    def end() -> bytes:
        look()
        raise EOFError

    channel: Any = SimpleNamespace(receive=end)
    monkeypatch.setenv(faults.VARIABLE, "")
    monkeypatch.setattr(worker, "_warm_up", look)
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        worker.serve(channel, worker.Board(1), 0, remote=False)
    assert seen == [signal.SIG_IGN] * 2
