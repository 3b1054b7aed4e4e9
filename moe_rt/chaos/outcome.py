"""What came of one trial of a group: what every rank reported, how soon, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from moe_rt.chaos.rank_pool import RankPool

P = TypeVar("P", bound=RankPool, contravariant=True)


class Trial(Protocol[P]):
    """Something that happens to a group in a session; `run` judges what the ranks then do."""

    @property
    def action(self) -> str:
        """What the command line calls it."""
        ...

    @property
    def text(self) -> str:
        """All of it, in a line."""
        ...

    def run(self, pool: P) -> Outcome[Any]:
        """The pool is complete again in its next session."""
        ...


T = TypeVar("T", bound=Trial[Any])


@dataclass
class Outcome(Generic[T]):
    """Of a trial: every rank's report (see `worker.serve`), by rank, and what is wrong with them.

    Attributes:
        milliseconds: how long each rank that had to notice something took; empty where nobody had to.
    """

    trial: T
    reports: dict[int, dict[str, Any]]
    milliseconds: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "trial": self.trial.text,
            "raised": {str(rank): report["raised"] for rank, report in sorted(self.reports.items())},
            "messages": {str(rank): r["message"] for rank, r in sorted(self.reports.items()) if "message" in r},
            "milliseconds": [round(ms, 2) for ms in self.milliseconds],
            "complaints": self.complaints,
        }


def alive(reports: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Without those of ranks that did not live to report."""
    return {rank: report for rank, report in reports.items() if report["raised"] not in ("killed", "hung")}


def not_raised(reports: dict[int, dict[str, Any]], ranks: Iterable[int], expected: set[str]) -> list[str]:
    """A complaint for each of the ranks that raised something else."""
    wrong = {rank: reports[rank] for rank in ranks if reports[rank]["raised"] not in expected}
    names = " or ".join(sorted(expected))
    return [
        f"rank {rank} raised {report['raised']}, expected {names}: {report.get('message', '').partition(chr(10))[0]}"
        for rank, report in wrong.items()
    ]


def after_all(reports: dict[int, dict[str, Any]]) -> list[str]:
    """A complaint for each rank that went on after an error, or kept something of a buffer that it had left."""
    complaints = []
    for rank, report in alive(reports).items():
        if report["raised"] != "nothing" and report["then"] == "nothing" and report["made"]:
            complaints.append(f"rank {rank} completed a step after {report['raised']}")
        kept = {name: report[name] for name in ("descriptors", "threads", "segments") if report[name] > 0}
        if kept:
            complaints.append(f"rank {rank} kept {', '.join(f'{count} {name}' for name, count in kept.items())}")
    return complaints


def not_done(reports: dict[int, dict[str, Any]], steps: int) -> list[str]:
    """A complaint for each rank that completed another number of steps."""
    short = {rank: report["steps"] for rank, report in alive(reports).items() if report["steps"] != steps}
    return [f"rank {rank} completed {done} steps, expected {steps}" for rank, done in short.items()]


def steps_of_all(pool: RankPool, ranks: Sequence[int], steps: int, timeout_s: float) -> list[str]:
    """The ranks make a newer group and work; a complaint for each that did not get through."""
    pool.session(ranks, steps)
    reports = pool.reports(ranks, timeout_s)
    return [f"in a newer group {text}" for text in not_raised(reports, ranks, {"nothing"})]
