"""Ratios of a benchmark next to those that baseline.json keeps: how much each changed, and which fell too far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GROSS = 2.0  # machines differ and are noisy; less than this is reported, but no failure

Baseline = dict[str, dict[str, float]]  # case -> contestant -> its isolated time over moe_rt's


@dataclass(frozen=True)
class Change:
    """How many times as long as moe_rt a contestant takes in a case, before and now. More is better."""

    case: str
    contestant: str
    before: float
    now: float

    @property
    def gross(self) -> bool:
        """Whether moe_rt's lead has fallen by more than GROSS."""
        return self.now * GROSS < self.before

    def __str__(self) -> str:
        part = f"{self.now / self.before:.0%}"
        return f"{self.case}: {self.contestant} / moe_rt {self.now:.3g}, baseline {self.before:.3g}, {part}"


def changes(runs: list[dict[str, Any]], baseline: Baseline) -> Iterator[Change]:
    """Of every ratio in the baseline. KeyError if a contestant, or moe_rt, is not in a run."""
    for run in runs:
        name = run["case"]["name"]
        for contestant, before in baseline[name].items():
            yield Change(name, contestant, before, run["ratios"][""][contestant]["isolated"])
