"""What the tables in docs/reliability.md share: how they came about, and how a span of times is written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from statistics import median

from moe_rt.testing.host_info import machine_card


def origin(ranks: int, command: str) -> str:
    """Where, when and by which command a table was made."""
    card = machine_card()
    return (
        f"{ranks} processes on {card['cores']} cores of {card['cpu']}, load average {card['load_average']:.1f}, "
        f"{date.today().isoformat()}, `{command}`."
    )


def span(milliseconds: Sequence[float]) -> str:
    """Median / worst; nothing of none."""
    return f"{median(milliseconds):.1f} / {max(milliseconds):.1f}" if milliseconds else ""
