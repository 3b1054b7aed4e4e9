"""Outcome of one trial of a group: the report of every rank, times, and complaints; and how tables show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from moe_rt.info import machine_card
from moe_rt.lab.chaos.rank_pool import RankPool

P = TypeVar("P", bound=RankPool, contravariant=True)


class Trial(Protocol[P]):
    """A fault that is injected into a group in a session. `run` judges the ranks' reaction."""

    @property
    def action(self) -> str:
        """Name on the command line."""
        ...

    @property
    def text(self) -> str:
        """One-line description."""
        ...

    def run(self, pool: P) -> Outcome[Any]:
        """Run the trial. The pool is complete again in its next session."""
        ...


T = TypeVar("T", bound=Trial[Any])


@dataclass
class Outcome(Generic[T]):
    """Every rank's report (see `worker.serve`) of one trial, and complaints about them.

    Attributes:
        milliseconds: time of each rank that had to notice a fault; empty if no rank had to.
    """

    trial: T
    reports: dict[int, dict[str, Any]]
    milliseconds: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "trial": self.trial.text,
            "raised": {str(rank): report["raised"] for rank, report in sorted(self.reports.items())},
            "messages": {str(rank): r["message"] for rank, r in sorted(self.reports.items()) if "message" in r},
            "milliseconds": [round(ms, 2) for ms in self.milliseconds],
            "complaints": self.complaints,
        }


def alive(reports: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Reports of the ranks that lived to report."""
    return {rank: report for rank, report in reports.items() if report["raised"] not in ("killed", "hung")}


def not_raised(reports: dict[int, dict[str, Any]], ranks: Iterable[int], expected: set[str]) -> list[str]:
    """A complaint for each of the ranks that raised another error."""
    wrong = {rank: reports[rank] for rank in ranks if reports[rank]["raised"] not in expected}
    names = " or ".join(sorted(expected))
    return [
        f"rank {rank} raised {report['raised']}, expected {names}: {report.get('message', '').partition(chr(10))[0]}"
        for rank, report in wrong.items()
    ]


def after_all(reports: dict[int, dict[str, Any]]) -> list[str]:
    """A complaint for each rank that continued after an error, or kept resources of a closed buffer."""
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
    """Let the ranks make a newer group and work; return a complaint for each that failed."""
    pool.session(ranks, steps)
    reports = pool.reports(ranks, timeout_s)
    return [f"in a newer group {text}" for text in not_raised(reports, ranks, {"nothing"})]


def origin(ranks: int, command: str) -> str:
    """State the machine, the date and the command of a table."""
    card = machine_card()
    return (
        f"{ranks} processes on {card['cores']} cores of {card['cpu']}, load average {card['load_average']:.1f}, "
        f"{date.today().isoformat()}, `{command}`."
    )


def span(milliseconds: Sequence[float]) -> str:
    """Median / worst; empty without times."""
    return f"{median(milliseconds):.1f} / {max(milliseconds):.1f}" if milliseconds else ""
