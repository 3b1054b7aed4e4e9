"""Ranks of moe-rt chaos note their steps on the board, and others wait for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.lab.chaos import injected_fault, worker
from moe_rt.lab.chaos.injected_fault import InjectedFault
from moe_rt.lab.chaos.rank_pool import RankPool

PATIENCE_S = 600.0


def test_steps_and_the_starts_of_ops_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step notes that it has begun, then the start of each op; both backward ops are one call."""
    board = worker.Board(3)
    noted: list[tuple[int, int]] = []
    monkeypatch.setattr(board, "begin", lambda place: noted.append((place, board.step[place])))
    with worker.make_buffer(ThreadGroup.make(1)[0], 1, worker.Size(), PATIENCE_S, PATIENCE_S) as buffer:
        steps = worker.Steps(buffer, board, 2, ("train", "no_grad"))
        for i in range(4):
            steps.run(i)
    assert noted == [(2, 1)] * 3 + [(2, 2)] * 2 + [(2, 3)] * 3 + [(2, 4)] * 2


def test_steps_are_awaited_until_all_ranks_have_begun_them() -> None:
    board, looks = worker.Board(2), list[list[int]]()

    def has_news(ranks: list[int], timeout_s: float) -> bool:
        looks.append(list(board.step))
        assert len(looks) < 3
        board.step[1] += 1
        return False

    pool: Any = SimpleNamespace(board=board, has_news=has_news)
    board.step[0], board.step[1] = 3, 1
    RankPool.await_steps(pool, [0, 1], 3)
    assert looks == [[3, 1], [3, 2]]
    pool.has_news = lambda ranks, timeout_s: True
    RankPool.await_steps(pool, [0, 1], 99)


@pytest.mark.parametrize(
    ("at", "do", "timeout_s"),
    [
        ("pre_rendezvous", "stop", injected_fault.INIT_TIMEOUT_S),
        ("pre_rendezvous", "kill", worker.PATIENCE_S),
        ("mid_payload", "stop", worker.PATIENCE_S),
        ("mid_payload", "kill", worker.PATIENCE_S),
    ],
)
def test_only_a_rank_that_stops_before_it_is_there_is_awaited_briefly(at: str, do: str, timeout_s: float) -> None:
    asked: list[float] = []

    class Asked(Exception):
        pass

    def session(*given: Any, init_timeout_s: float, **orders: Any) -> None:
        asked.append(init_timeout_s)
        raise Asked

    pool: Any = SimpleNamespace(size=3, session=session)
    with pytest.raises(Asked):
        InjectedFault(1, 5, at, do).run(pool)
    assert asked == [timeout_s]
