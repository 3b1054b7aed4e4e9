"""A report as a table for people."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_rt.diagnostics.report import KINDS, OpRecord, RankReport, Report, name_ranks

SHOWN_OPS = 3
COLUMNS = ("rank", "pid", "process", *KINDS, "what it does", "lately", "poison", "last ops")


def show_report(report: Report) -> RenderableType:
    """Return the table of ranks, and the conclusion."""
    table = Table(*COLUMNS)
    for rank in report.ranks:
        announced = [str(rank.announced[kind]) for kind in KINDS]
        cells = [str(rank.rank), str(rank.pid), rank.process, *announced, rank.state, lately(rank.last_ops)]
        table.add_row(*map(Text, [*cells, _poison(rank), _last_ops(rank)]))
    sizes = ", ".join(f"{name} {size}" for name, size in report.sizes.items())
    head = Text(f"{len(report.ranks)} ranks, {sizes}, configuration {report.config}")
    calls = [Text(report.disagreement.calls, "bold")] if report.disagreement else []
    return Group(head, table, *map(Text, nodes(report)), *calls, Text(report.conclusion, "bold"))


def nodes(report: Report) -> list[str]:
    """Return a line for each of several nodes: its ranks, and the remote ranks that each is the proxy of."""
    by_node: dict[int, list[str]] = {}
    for rank in report.ranks:
        serves = f" (forwards for {name_ranks(rank.serves)})" if rank.serves else ""
        by_node.setdefault(rank.node, []).append(f"rank {rank.rank}{serves}")
    return [f"node {node}: {', '.join(ranks)}" for node, ranks in sorted(by_node.items())] if len(by_node) > 1 else []


def lately(ops: list[OpRecord]) -> str:
    """Say what share of its last ops' time a rank was in them and waited, and which peer it waited for longest."""
    ended = [op for op in ops if op.end_ns]
    if len(ended) < 2 or (span := ended[-1].end_ns - ended[0].start_ns) <= 0:  # a peer's records may contain anything
        return ""
    inside = sum(op.end_ns - op.start_ns for op in ended)
    waiting = sum((op.arrived_ns or op.end_ns) - op.announced_ns for op in ended if op.announced_ns)
    shares = f"{100 * inside / span:.0f}% in them, {100 * waiting / span:.0f}% waiting"
    said = f"{len(ended)} ops in {span / 1e9:.3g} s: {shares}"
    waits = Counter[int]()
    for op in ended:
        if op.longest_peer >= 0:
            waits[op.longest_peer] += op.longest_ns
    return f"{said}, longest for rank {max(waits, key=lambda peer: waits[peer])}" if waits else said


def _poison(rank: RankReport) -> str:
    return "; ".join(said for said in (rank.poison, rank.last_words) if said)


def _last_ops(rank: RankReport) -> str:
    return "\n".join(f"{op} {op.status or op.phase}" for op in rank.last_ops[-SHOWN_OPS:])
