"""A report as a table for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_rt.diagnostics.report import KINDS, RankReport, Report

SHOWN_OPS = 3


def show_report(report: Report) -> RenderableType:
    """The ranks, and whom to look at first."""
    table = Table("rank", "pid", "process", *KINDS, "what it does", "poison", "last ops")
    for rank in report.ranks:
        announced = [str(rank.announced[kind]) for kind in KINDS]
        cells = [str(rank.rank), str(rank.pid), rank.process, *announced, rank.state, _poison(rank), _last_ops(rank)]
        table.add_row(*map(Text, cells))
    sizes = ", ".join(f"{name} {size}" for name, size in report.sizes.items())
    head = Text(f"{len(report.ranks)} ranks, {sizes}, configuration {report.config}")
    calls = [Text(report.disagreement.calls, "bold")] if report.disagreement else []
    return Group(head, table, *calls, Text(report.conclusion, "bold"))


def _poison(rank: RankReport) -> str:
    return "; ".join(said for said in (rank.poison, rank.last_words) if said)


def _last_ops(rank: RankReport) -> str:
    return "\n".join(f"{op} {op.status or op.phase}" for op in rank.last_ops[-SHOWN_OPS:])
