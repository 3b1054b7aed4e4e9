"""Kills of a server's rank: one that comes after an answer is complete is undone, and tried again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from moe_rt.lab.bench.serving import conduct

RANKS, VICTIM = 2, 41


class Scene:
    """A server, and its clients' threads. Answers are complete before the first `early` signals that stop a rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, early: int) -> None:
        self.early, self.signals, self.asked = early, list[tuple[int, signal.Signals]](), list[Future[Any]]()
        monkeypatch.setattr(conduct.os, "kill", self.kill)
        monkeypatch.setattr(conduct, "ThreadPoolExecutor", lambda size: self)

    def kill(self, pid: int, number: signal.Signals) -> None:
        self.signals.append((pid, number))
        if number == signal.SIGKILL:
            for one in self.asked:
                one.set_result((time.monotonic() + 5.0, 500))

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Any, server: Any, prompt: list[int]) -> Future[Any]:
        one: Future[Any] = Future()
        if self.signals.count((VICTIM, signal.SIGSTOP)) < self.early:
            one.set_result((0.0, 200))
        else:
            self.asked.append(one)
        return one

    def workers(self) -> list[int]:
        return [40, VICTIM]

    def streamed(self, prompt: list[int], length: int) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_rank_is_stopped_until_the_requests_are_under_way(monkeypatch: pytest.MonkeyPatch, early: int) -> None:
    scene: Any = Scene(monkeypatch, early)
    assert 4.0 < conduct._kill_one(scene, RANKS, 1, seed=0) <= 5.0
    undone = [(VICTIM, signal.SIGSTOP), (VICTIM, signal.SIGCONT)] * early
    assert scene.signals == [*undone, (VICTIM, signal.SIGSTOP), (VICTIM, signal.SIGKILL)]
    assert len(scene.asked) == RANKS * conduct.REQUESTS_PER_RANK


def test_answers_that_are_always_complete_are_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    scene: Any = Scene(monkeypatch, conduct.ATTEMPTS)
    with pytest.raises(conduct.NotEnded, match="expected longer ones"):
        conduct._kill_one(scene, RANKS, 1, seed=0)
    assert scene.signals == [(VICTIM, signal.SIGSTOP), (VICTIM, signal.SIGCONT)] * conduct.ATTEMPTS
