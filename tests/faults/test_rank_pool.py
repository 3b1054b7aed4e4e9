"""Ranks of chaos that run in different sessions concurrently, what pools send them, and the keys that they leave."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from moe_rt.lab.chaos import node_pool, rank_pool, worker
from moe_rt.lab.chaos.node_pool import NodePool
from moe_rt.lab.chaos.rank_pool import ENDLESS, STORE, RankPool, keys_left
from moe_rt.lab.testing.process_ranks import ProcessRanks
from moe_rt.memory import ucx


def test_a_newer_session_has_an_end_of_its_own() -> None:
    """A rank that was stopped in an older session resumes there, and does not end with the newer one."""
    with RankPool(2) as pool:
        pool.session([0], ENDLESS)
        pool.session([1], 3)
        newer = pool.report(1, 600.0)
        assert (newer["raised"], newer["steps"]) == ("nothing", 3)
        assert list(pool.board.steps) == [ENDLESS, 3]
        last = pool.finish([0])
        older = pool.report(0, 600.0)
        assert (older["raised"], older["steps"]) == ("nothing", last)
        assert last > 3
        assert pool.keys_left() == 0


def test_keys_that_a_session_leaves() -> None:
    """Places, the count of changes, and words of meetings that were not held stay; all else of moe_rt is left over."""
    store = HashStore()
    stays = ("1/connected/0", "1/0//cpu//0/1", "1/0//moe_rt/places/0", "1/0//moe_rt/meetings/changes")
    for key in stays:
        store.set(key, "text")
    store.set("1/0//moe_rt/0123456789abcdef/0", "over")
    assert keys_left(store) == 0
    for number, (name, value) in enumerate([("0", "takes place"), ("0/1", "{}"), ("left", "2"), ("1", '{"rank": 0}')]):
        store.set(f"2/0//moe_rt/0123456789abcdef/{name}", value)
        assert keys_left(store) == number + 1


class Started(RankPool):
    """A pool whose processes are not started; messages to them are noted, and answers are given."""

    def __init__(self, size: int, **options: Any) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.did: list[tuple[Any, ...]] = []
        self.answers: dict[int, Any] = {STORE: b"4321"}
        super().__init__(size, **options)

    def start(self, rank: int, work: Callable[..., object], *arguments: Any) -> None:
        self.started.append((rank, work, *arguments))

    def __contains__(self, rank: int) -> bool:
        return any(rank == each[0] for each in self.started)

    def send(self, rank: int, message: bytes) -> None:
        self.sent.append((rank, json.loads(message or b"{}")))

    def receive(self, rank: int, timeout_s: float | None = None) -> bytes:
        self.did.append(("receive", rank, timeout_s))
        if isinstance(self.answers[rank], Exception):
            raise self.answers[rank]
        return self.answers[rank]

    def send_signal(self, rank: int, number: int) -> None:
        self.did.append((signal.Signals(number).name, rank))

    def stopped(self, rank: int) -> bool:
        self.did.append(("stopped?", rank))
        return self.did.count(("stopped?", rank)) > 1

    def has_news(self, ranks: Any, timeout_s: float = 0.0) -> bool:
        self.did.append(("news?", *ranks, timeout_s))
        return False

    def kill(self, rank: int) -> None:
        self.did.append(("kill", rank))


def test_orders_of_sessions() -> None:
    """Ranks have new numbers in each session, and orders of their own precede those of all."""
    assert ENDLESS >= 2**60, "no session lasts that long"
    pool = Started(3, host="here")
    assert pool.started == [(STORE, rank_pool._serve_store, "here")]
    pool.board.began[2], pool.board.step[2] = 5.0, 7
    pool.session([2, 0], 9, {0: {"limit": ["memory", 1], "depth": 2}}, depth=1, timeout_s=2.0)
    assert pool.started[1:] == [(rank, worker.serve, pool.board, rank, False) for rank in (2, 0)]
    common = {"timeout_s": 2.0, "init_timeout_s": 60.0, "host": "here", "port": 4321, "session": "1", "size": 2}
    assert pool.sent == [
        (2, {**common, "rank": 0, "depth": 1}), (0, {**common, "rank": 1, "depth": 2, "limit": ["memory", 1]}),
    ]  # fmt: skip
    assert (list(pool.board.began), list(pool.board.step), list(pool.board.steps)) == ([0] * 3, [-1, 0, -1], [9, 0, 9])
    pool.session([2, 1], 4, init_timeout_s=3.0)
    assert [each[0] for each in pool.started] == [STORE, 2, 0, 1], "a rank that runs is not started again"
    assert pool.sent[2:] == [
        (rank, {**common, "timeout_s": 60.0, "init_timeout_s": 3.0, "session": "2", "rank": number})
        for number, rank in enumerate((2, 1))
    ]
    assert list(pool.board.steps) == [9, 4, 4]


def test_a_session_is_ended_while_its_ranks_are_stopped() -> None:
    pool = Started(3)
    pool.did.clear()
    pool.board.step[0], pool.board.step[1], pool.board.step[2] = 5, 8, 3
    assert pool.finish([0, 2]) == 28, "of the steps of all ranks, those of other sessions included"
    assert list(pool.board.steps) == [28, 0, 28]
    looks = [(what, rank, *more) for rank in (0, 2) for what, *more in (("stopped?",), ("news?", 0.001), ("stopped?",))]
    assert pool.did == [("SIGSTOP", 0), ("SIGSTOP", 2), *looks, ("SIGCONT", 0), ("SIGCONT", 2)]


def test_reports_of_ranks() -> None:
    """A rank without a report is ended, so that the next session starts it again."""
    pool = Started(4)
    pool.did.clear()
    pool.answers = {0: b'{"raised": "nothing"}', 1: EOFError(), 2: TimeoutError(), STORE: b"5"}
    assert pool.reports([2, 0, 1], 7.0) == {2: {"raised": "hung"}, 0: {"raised": "nothing"}, 1: {"raised": "killed"}}
    asked = [("receive", rank, 7.0) for rank in (2, 0, 1)]
    assert pool.did == [asked[0], ("kill", 2), *asked[1:], ("kill", 1)]
    assert (pool.kept(), pool.keys_left()) == ({}, 5)
    assert pool.sent == [(STORE, {})]


class Cluster:
    """A cluster that is not there; its calls are noted."""

    name = "a_cluster"

    def __init__(self, calls: list[tuple[Any, ...]], purpose: str) -> None:
        self._calls = calls
        calls.append(("cluster", purpose))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self._calls.append((name, *given))
            return {"address": "10.0.0.9", "init_process": 77}.get(name)

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(node_pool, "OwnCluster", lambda purpose: Cluster(noted, purpose))
    monkeypatch.setattr(ucx, "library", lambda: noted.append(("ucx",)))
    monkeypatch.setattr(ProcessRanks, "start", lambda pool, rank, work, *given: noted.append(("start", rank, *given)))
    monkeypatch.setattr(ProcessRanks, "receive", lambda pool, rank, timeout_s=None: b"3")
    monkeypatch.setattr(ProcessRanks, "send", lambda pool, rank, message: noted.append(("send", rank, message)))
    return noted


def test_ranks_are_started_in_their_nodes(calls: list[tuple[Any, ...]]) -> None:
    """One node more than those of ranks has the store."""
    with NodePool((2, 0, 1)) as pool:
        assert calls == [
            ("ucx",), ("cluster", "chaos"), ("up", 4), ("address", 3),
            ("start", STORE, "a_cluster", 3, rank_pool._serve_store, "10.0.0.9"),
        ]  # fmt: skip
        assert (pool.size, pool.remote, pool.node_of, pool.nodes) == (3, True, [0, 0, 2], (2, 0, 1))
        assert [pool.ranks_of(node) for node in range(3)] == [[0, 1], [], [2]]
        del calls[:]
        pool.session([2, 1], 5)
        assert [call for call in calls if call[0] == "start"] == [
            ("start", rank, "a_cluster", node, worker.serve, pool.board, rank, True) for rank, node in ((2, 2), (1, 0))
        ]
        del calls[:]
        assert pool.kept() == {"store keys": 3}
        assert calls == [("send", STORE, b"")]
        del calls[:]
    assert calls == [("down",)]


def test_a_cluster_is_taken_down_if_its_ranks_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]
) -> None:
    def fail(pool: ProcessRanks, *given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProcessRanks, "start", fail)
    with pytest.raises(KeyboardInterrupt):
        NodePool((1, 1))
    assert calls[2:] == [("up", 3), ("address", 2), ("down",)]
    monkeypatch.setattr(ProcessRanks, "start", lambda *given: None)
    monkeypatch.setattr(ProcessRanks, "close", fail)
    del calls[:]
    with pytest.raises(KeyboardInterrupt):
        NodePool((1, 1)).close()
    assert calls[-1] == ("down",)


def test_signals_reach_ranks_in_their_nodes(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]) -> None:
    """A signal goes to the child of the process that starts the rank, once there is one, and to no rank that ended."""
    children, ended, sent, states = ["", "", "4004 5005"], [False] * 9, list[Any](), list[str]()

    def read(path: Path) -> str:
        assert str(path) == "/proc/31/task/31/children"
        if len(children) == 3:
            children.pop(0)
            raise FileNotFoundError
        return children.pop(0) if len(children) > 1 else children[0]

    monkeypatch.setattr(node_pool, "Path", lambda path: SimpleNamespace(read_text=lambda: read(path)))
    monkeypatch.setattr(ProcessRanks, "pid", lambda pool, rank: 31)
    monkeypatch.setattr(ProcessRanks, "await_end", lambda pool, rank, timeout_s: ended.pop(0))
    monkeypatch.setattr(node_pool, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(rank_pool, "state_letter", lambda pid: states.pop(0) if pid == 4004 else "?")
    pool = NodePool((1, 1))
    pool.send_signal(1, signal.SIGTERM)
    assert sent == [(4004, signal.SIGTERM)]
    assert len(ended) == 6, "it has looked three times"
    states += ["T", "S"]
    assert [pool.stopped(1), pool.stopped(1)] == [True, False]
    ended[:] = [True] * 3
    with pytest.raises(ProcessLookupError):
        pool.pid(1)
    pool.send_signal(1, signal.SIGTERM)
    assert not pool.stopped(1)
    pool.kill_node(1)
    assert sent[1:] == [(77, signal.SIGKILL)]
    assert calls[-1] == ("init_process", 1)


@pytest.mark.parametrize("child", [0, 77])
def test_a_process_starts_its_rank_in_a_node(monkeypatch: pytest.MonkeyPatch, child: int) -> None:
    """The rank works, and its starter leaves the channel to it and ends with it; neither heeds Ctrl-C."""
    did: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: did.append((number, handler)))
    monkeypatch.setattr(node_pool, "Cluster", lambda name: f"cluster {name}")
    monkeypatch.setattr(node_pool, "fork_into", lambda cluster, node: did.append((cluster, node)) or child)
    monkeypatch.setattr(node_pool.os, "waitpid", lambda pid, options: did.append(("waited", pid, options)))
    channel: Any = SimpleNamespace(close=lambda: did.append("closed"))

    def work(*given: Any) -> str:
        did.append(given)
        return "done"

    result = node_pool._in_node(channel, "name", 2, work, "more", 3)
    begin = [(signal.SIGINT, signal.SIG_IGN), ("cluster name", 2)]
    if child:
        assert (result, did) == (None, [*begin, "closed", ("waited", 77, 0)])
    else:
        assert (result, did) == ("done", [*begin, (channel, "more", 3)])
