"""The fault matrix and a few rounds of chaos, each in a dedicated process, which forks the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.forked_python import run_python

from moe_rt.lab.chaos.injected_fault import POINTS_OF_ONE_HOST, InjectedFault
from moe_rt.lab.chaos.matrix import committed, injected_faults
from moe_rt.lab.chaos.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[2]


def last_line(*command: str) -> dict[str, Any]:
    """Return the document that a command prints last."""
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    return last_line("-m", "moe_rt.lab.chaos.matrix")


def test_every_survivor_raises_what_it_must(matrix: dict[str, Any]) -> None:
    assert [outcome for outcome in matrix["outcomes"] if outcome["complaints"]] == []
    assert len(matrix["outcomes"]) == len(list(injected_faults())) >= 3 * 3 * 5 + 3 * 5  # kill, stop, raise
    assert set(matrix["classes"]) == set(POINTS_OF_ONE_HOST)


def test_how_soon_deaths_are_noticed_is_reported(matrix: dict[str, Any]) -> None:
    """Print how soon deaths are noticed, which depends on the machine. The errors show that no rank waits for its
    timeout."""
    noticed = matrix["kill_ms"]
    print(f"a kill is noticed after {noticed['median']:.1f} ms, at worst {noticed['worst']:.1f} ms")
    assert 0 < noticed["median"] <= noticed["worst"]


def test_the_committed_table_is_what_happens(matrix: dict[str, Any]) -> None:
    assert committed((ROOT / "docs/reliability.md").read_text()) == matrix["classes"]


def test_chaos() -> None:
    document = last_line("-m", "moe_rt", "chaos", "--rounds", "5", "--seed", "3")
    assert document["complaints"] == []
    assert sum(action["rounds"] for action in document["actions"].values()) == 5


@pytest.mark.parametrize(
    ("action", "rounds"),
    [("kill", 8), ("heavy", 4), ("freeze", 4), ("interrupt", 9), ("limit", 12), ("evaluate", 6)],
)
def test_chaos_of_one_action(action: str, rounds: int) -> None:
    document = last_line("-m", "moe_rt", "chaos", "--rounds", str(rounds), "--action", action)
    assert document["complaints"] == []
    assert document["actions"][action]["rounds"] == rounds
    assert list(document["actions"]) == [action]


class BusyMachine:
    """Ranks whose first wait expires before rank 1 has stopped, unless timeout_s is a second or more."""

    size = 3

    def __init__(self) -> None:
        self.board = SimpleNamespace(began=[0.0] * 3)
        self.timeouts: list[float] = []
        self.unheard: set[int] = set()

    def session(self, ranks: Any, steps: int, only: Any = None, *, timeout_s: float = 60.0, **orders: Any) -> None:
        assert self.unheard.isdisjoint(ranks), "what is not heard would be taken for a report of this session"
        self.unheard |= set(ranks)
        self.timeouts.append(timeout_s)
        self.early, self.afterlife = timeout_s < 1.0, len(ranks) < 3

    def report(self, rank: int, timeout_s: float) -> dict[str, Any]:
        self.unheard.remove(rank)
        raised = "nothing" if self.afterlife and rank != 1 else "GroupPoisoned" if rank == 1 else "PeerTimeout"
        done = {"raised": raised, "steps": 0 if self.early else 1, "then": raised, "made": True, "at": 1.0}
        return done | dict.fromkeys(("descriptors", "threads", "segments"), 0)

    def reports(self, ranks: Any, timeout_s: float) -> dict[int, dict[str, Any]]:
        return {rank: self.report(rank, timeout_s) for rank in ranks}

    def await_stop(self, rank: int) -> None:
        pass

    def stopped(self, rank: int) -> bool:
        return not self.early

    def send_signal(self, rank: int, number: int) -> None:
        pass


def test_a_wait_that_expires_before_its_rank_stops_is_no_trial() -> None:
    machine = BusyMachine()
    outcome = InjectedFault(1, 5, "mid_payload", "stop", stop_timeout_s=0.01).run(cast(RankPool, machine))
    assert outcome.complaints == []
    assert machine.timeouts == [0.01, 0.1, 1.0, 60.0]  # the last one is of the survivors' group
