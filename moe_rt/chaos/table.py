"""Common parts of the tables in docs/reliability.md: their origin, and the format of times."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from statistics import median

from moe_rt.testing.host_info import machine_card


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
