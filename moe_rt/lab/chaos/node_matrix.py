"""Errors of ranks on emulated nodes after a failure, by either route, as the table in docs/reliability.md.

    python -m moe_rt.lab.chaos.node_matrix --write docs/reliability.md

The last line is one JSON document; the exit status is 1 if a survivor raised anything but the expected error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from moe_rt.config.options import Route
from moe_rt.diagnostics.output import replace_section, section_marks
from moe_rt.lab.chaos.injected_fault import OF_FORWARDERS, InjectedFault
from moe_rt.lab.chaos.node_pool import NodePool
from moe_rt.lab.chaos.node_trials import ROUTES, Kill, LinkFault, Misbehaviour, Moment, Stop
from moe_rt.lab.chaos.outcome import Outcome, Trial, origin
from moe_rt.lab.chaos.worker import TIGHT, Size

NODES = (2, 1)
FAULTY_RANK, LONE_RANK = 1, 2  # with a neighbour on the node, which sees its process; and without
COMBINE, BACKWARD = 6, 7  # op numbers in the second step
COMMAND = "python -m moe_rt.lab.chaos.node_matrix --write docs/reliability.md"
Row = Callable[[Moment], Trial[NodePool]]
ROWS: dict[str, Row] = {
    "a rank is killed": lambda moment: Kill("kill", FAULTY_RANK, moment),
    "all ranks of a node are killed": lambda moment: Kill("ranks", FAULTY_RANK, moment),
    "a node dies": lambda moment: Kill("node", LONE_RANK, moment),
    "a rank is stopped, and continues after it was given up": lambda moment: Stop("stop", LONE_RANK, moment, 0.0, True),
    "a rank is stopped for a moment": lambda moment: Stop("pause", FAULTY_RANK, moment, 0.2, False),
    "a link goes down, and comes back when all have raised": lambda moment: LinkFault("cut", 1, moment, 0.0, ""),
    "a link is down for a moment": lambda moment: LinkFault("blink", 1, moment, 0.3, ""),
    "a link loses packets for a moment": lambda moment: LinkFault("lossy", 1, moment, 0.3, "5mbit"),
    "a rank raises": lambda moment: Misbehaviour("raise", FAULTY_RANK, moment),
    "a rank aborts its buffer": lambda moment: Misbehaviour("abort", LONE_RANK, moment),
    "a rank closes early": lambda moment: Misbehaviour("close", FAULTY_RANK, moment),
    "a rank calls another op": lambda moment: Misbehaviour("order", LONE_RANK, moment),
    "one rank's input is bad: all refuse it, and continue": lambda moment: Misbehaviour("input", LONE_RANK, moment),
    "a rank would receive too many rows: all refuse that, and continue": lambda moment: Misbehaviour(
        "overflow", FAULTY_RANK, moment
    ),
    "a proxy is killed before it forwards a combine": lambda moment: _of_forwarder("kill", COMBINE, moment),
    "a proxy is killed before it forwards a backward": lambda moment: _of_forwarder("kill", BACKWARD, moment),
    "a proxy raises before it forwards a combine": lambda moment: _of_forwarder("raise", COMBINE, moment),
}


def _of_forwarder(do: str, op: int, moment: Moment) -> InjectedFault:
    return InjectedFault(FAULTY_RANK, op, OF_FORWARDERS, do, route=moment.size.route)


def measure(progress: Callable[[str], None], routes: Sequence[Route] = ROUTES) -> dict[str, dict[str, Outcome[Any]]]:
    """Run every row on every route. Faults of proxies exist on the two-level route only."""
    outcomes: dict[str, dict[str, Outcome[Any]]] = {name: {} for name in ROWS}
    with NodePool(NODES) as pool:
        for route in routes:
            for name, row in ROWS.items():
                trial = row(Moment(Size(route=route, capacity_factor=TIGHT), 3, 0.0))
                if route != "flat" or not isinstance(trial, InjectedFault):
                    progress(f"{route}: {name}")
                    outcomes[name][route] = trial.run(pool)
    return outcomes


def classes(outcomes: dict[str, dict[str, Outcome[Any]]]) -> dict[str, dict[str, str]]:
    """{row: {route: errors of the ranks}}, without notices from other ranks and without the faulty rank's own error."""
    return {name: {route: _class(o) for route, o in of_routes.items()} for name, of_routes in outcomes.items()}


def _class(outcome: Outcome[Any]) -> str:
    # The rank that calls another op may be the first to notice.
    culprit = -1 if outcome.trial.action == "order" else getattr(outcome.trial, "rank", -1)
    seen = {report["raised"] for rank, report in outcome.reports.items() if rank != culprit} - {"killed"}
    return " or ".join(sorted(seen - {"GroupPoisoned"} or seen))


def markdown(outcomes: dict[str, dict[str, Outcome[Any]]]) -> str:
    """The table and its origin."""
    lines = [origin(sum(NODES), COMMAND), "", "| What happens | " + " | ".join(f"`{r}`" for r in ROUTES) + " |"]
    lines.append("|---" * (len(ROUTES) + 1) + "|")
    for name, row in classes(outcomes).items():
        lines.append(f"| {name} | " + " | ".join(row.get(route, "") for route in ROUTES) + " |")
    return "\n".join(lines)


def committed(text: str) -> dict[str, dict[str, str]]:
    """Parse `classes` from a document's table."""
    begin, end = section_marks("nodes")
    table = text.partition(begin)[2].partition(end)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("| ")]
    return {name: {r: c for r, c in zip(ROUTES, cells, strict=True) if c} for name, *cells in rows[1:]}


@click.command()
@click.option(
    "--route", "routes", type=click.Choice(ROUTES), multiple=True, default=ROUTES, help="Route; may be repeated."
)
@click.option(
    "--write", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Document that holds the table."
)
def main(routes: tuple[Route, ...], write: Path | None) -> None:
    """Run every row of the table on ranks on two emulated nodes, by either route. It needs root."""
    outcomes = measure(lambda text: click.echo(text, err=True), routes)
    of_all = [outcome for row in outcomes.values() for outcome in row.values()]
    table, wrong = markdown(outcomes), [o for o in of_all if o.complaints]
    click.echo(table)
    if write is not None and set(routes) == set(ROUTES) and not wrong:
        replace_section(write, "nodes", table)
    document = {"outcomes": [o.describe() for o in of_all], "classes": classes(outcomes)}
    click.echo(json.dumps(document, separators=(",", ":")))
    if wrong:
        raise click.ClickException("; ".join(f"{o.trial.text}: {', '.join(o.complaints)}" for o in wrong))


if __name__ == "__main__":
    main()
