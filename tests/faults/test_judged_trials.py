"""Trials of moe-rt chaos complain about reports of ranks, which a test makes up."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt.lab.chaos import node_trials, trials

GOOD: dict[str, Any] = {
    "raised": "nothing", "then": "nothing", "made": True, "steps": 2, "descriptors": 0, "threads": 0, "segments": 0,
}  # fmt: skip


def raised(error: str, **more: Any) -> dict[str, Any]:
    return {**GOOD, "raised": error, "then": error, **more}


class Pool:
    """Three ranks that report what a test says; a later session goes well."""

    size, remote = 3, False

    def __init__(self, *reports: dict[str, Any], remote: bool = False) -> None:
        self._sessions, self.remote = [dict(enumerate(reports))], remote
        self.board = SimpleNamespace(began=[10.0, 20.0, 30.0])
        self.signals: list[tuple[int, int]] = []
        self.asked: list[Any] = []

    def session(self, ranks: Sequence[int], steps: int, only: Mapping[int, Any] | None = None, **orders: Any) -> None:
        self.asked.append((steps, dict(only or {}), orders))
        self._sessions.append(dict.fromkeys(ranks, GOOD))

    def reports(self, ranks: Sequence[int], timeout_s: float) -> dict[int, dict[str, Any]]:
        return {rank: self._sessions[len(self.asked) - 1][rank] for rank in ranks}

    def send_signal(self, rank: int, number: int) -> None:
        self.signals.append((rank, number))

    def await_steps(self, ranks: Sequence[int], steps: int) -> None: ...
    def await_stop(self, rank: int) -> None: ...


INTERRUPTED = raised("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("others", "complaints"),
    [
        ([raised("GroupPoisoned", peer=0)] * 2, []),
        ([raised("GroupPoisoned", peer=0), raised("GroupPoisoned", peer=1)], ["rank 2 blamed rank 1"]),
        ([raised("GroupPoisoned", peer=0), raised("GroupPoisoned")], ["rank 2 blamed rank None"]),
        ([raised("GroupPoisoned", peer=0), raised("PeerDead", peer=0)], ["rank 2 raised PeerDead, expected"]),
        ([raised("GroupPoisoned", peer=0), {"raised": "killed"}], ["rank 2 raised killed, expected GroupPoisoned"]),
    ],
    ids=["good", "another rank", "nobody", "another error", "killed"],
)
@pytest.mark.parametrize("where", trials.PLACES)
def test_an_interrupt(where: str, others: list[dict[str, Any]], complaints: list[str]) -> None:
    """Every other rank must name the interrupted one."""
    pool: Any = Pool(INTERRUPTED, *others)
    found = trials.Interrupt(rank=0, late=2, where=where, step=1, after_s=0.0).run(pool).complaints
    assert len(found) == len(complaints), found
    assert all(text.startswith(start) for text, start in zip(found, complaints, strict=True)), found
    stop, go = (2, signal.SIGSTOP), (2, signal.SIGCONT)
    expected = {"anywhere": [], "in_an_op": [stop, go], "while_making": [go]}[where]
    assert [sent for sent in pool.signals if sent != (0, signal.SIGINT)] == expected


@pytest.mark.parametrize(("remote", "num_complaints"), [(True, 0), (False, 2)])
def test_a_remote_late_rank_may_have_lost_its_peers(remote: bool, num_complaints: int) -> None:
    pool: Any = Pool(INTERRUPTED, raised("GroupPoisoned", peer=0), raised("PeerDead", peer=1), remote=remote)
    found = trials.Interrupt(rank=0, late=2, where="in_an_op", step=1, after_s=0.0).run(pool).complaints
    assert len(found) == num_complaints, found


NO_BUFFER = {"typed": True, "made": False}
SCARCE: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "all have one": ([GOOD] * 3, []),
    "none has one": ([raised("LimitReached", **NO_BUFFER)] * 3, []),
    "one has one": ([raised("LimitReached", **NO_BUFFER)] * 2 + [GOOD], ["rank 2 raised nothing", "rank 2 has made"]),
    "untyped": ([raised("LimitReached", **NO_BUFFER)] * 2 + [raised("OSError", made=False)], ["rank 2 raised OSError"]),
    "late": (
        [raised("LimitReached", **NO_BUFFER)] * 2 + [raised("PeerTimeout", **NO_BUFFER)], ["rank 2 raised PeerTimeout"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCARCE)
def test_a_scarce_resource(name: str) -> None:
    """All ranks make a buffer, or all promptly raise a typed error. Times count from the limited rank's start."""
    reports, complaints = SCARCE[name]
    pool: Any = Pool(*({**report, "at": 20.5} for report in reports))
    found = trials.Scarcity(rank=1, kind="descriptors", room=3).run(pool)
    assert pool.asked[0][1] == {1: {"limit": ["descriptors", 3]}}
    assert found.milliseconds == pytest.approx([500.0] * 3)
    assert len(found.complaints) == len(complaints), found.complaints
    assert all(text.startswith(start) for text, start in zip(found.complaints, complaints, strict=True)), found


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("slow", [("limit", 1, "5mbit"), ("unlimit", 1)]),
        ("lossy", [("limit", 1, "5mbit", node_trials.SHORT_QUEUE), ("unlimit", 1)]),
        ("blink", [("cut", 1), ("mend", 1)]),
        ("flap", [("cut", 1), ("mend", 1)]),
    ],
)
def test_a_link_fault_ends_what_it_began(action: str, expected: list[tuple[Any, ...]]) -> None:
    """A lossy link has a short queue, which drops packets; a slow one does not."""
    done: list[tuple[Any, ...]] = []
    names = ("limit", "unlimit", "cut", "mend")
    calls = {name: lambda *given, name=name: done.append((name, *given)) for name in names}
    pool: Any = SimpleNamespace(cluster=SimpleNamespace(**calls))
    moment: Any = None
    fault = node_trials.LinkFault(action, 1, moment, 0.1, "5mbit")
    fault._begin(pool)
    fault._end(pool)
    assert done == expected
