"""A failed start of engines ends the wait of the program that started them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from moe_rt.lab.testing.serving import engines


class Ranks:
    """Stand-in for processes: rank 1 fails, and rank 0 waits for it in silence."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self.said = {1: b'{"failed": "no port"}'}

    def start(self, rank: int, *arguments: Any) -> None:
        pass

    def has_news(self, ranks: Iterable[int], timeout_s: float = 0.0) -> bool:
        if timeout_s:
            self.limits.append(timeout_s)
        return any(rank in self.said for rank in ranks)

    def receive(self, rank: int, timeout_s: float) -> bytes:
        if rank not in self.said:
            raise TimeoutError
        return self.said.pop(rank)

    def send_signal(self, rank: int, number: int) -> None:
        pass


def test_peers_of_an_engine_that_fails_are_waited_for_briefly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks()
    monkeypatch.setattr(engines, "ProcessRanks", lambda: ranks)
    assert [str(said) for said in engines.EngineRanks(tmp_path, 2).started()] == ["rank 0: TimeoutError", "no port"]
    assert ranks.limits == [engines.START_S, engines.AFTER_FAILURE_S]
