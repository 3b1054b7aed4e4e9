"""Compare the ratios of a benchmark with those in baseline.json, and find gross regressions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GROSS = 2.0  # machines differ and are noisy; a smaller change is reported but is no failure

Baseline = dict[str, dict[str, float]]  # case -> contestant -> its isolated time over moe_rt's


@dataclass(frozen=True)
class Change:
    """A contestant's time in a case as a multiple of moe_rt's, before and now. More is better."""

    case: str
    contestant: str
    before: float
    now: float

    @property
    def gross(self) -> bool:
        """True if moe_rt's lead has fallen by more than GROSS."""
        return self.now * GROSS < self.before

    def __str__(self) -> str:
        part = f"{self.now / self.before:.0%}"
        return f"{self.case}: {self.contestant} / moe_rt {self.now:.3g}, baseline {self.before:.3g}, {part}"


def changes(runs: list[dict[str, Any]], baseline: Baseline) -> Iterator[Change]:
    """Compare every ratio in the baseline. KeyError if a contestant, or moe_rt, is not in a run."""
    for run in runs:
        name = run["case"]["name"]
        for contestant, before in baseline[name].items():
            yield Change(name, contestant, before, run["ratios"][""][contestant]["isolated"])
