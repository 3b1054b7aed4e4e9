"""The fault matrix: every point, every action, every kind of op; as a table that docs/reliability.md holds.

    python -m moe_rt.chaos.matrix --write docs/reliability.md

The last line is one JSON document; the exit status is 1 if a survivor did anything but what it must.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click

from moe_rt.chaos.injected_fault import BETWEEN_OPS, IN_OPS, POINTS_OF_ONE_HOST, SURVIVORS_RAISE, InjectedFault
from moe_rt.chaos.outcome import Outcome
from moe_rt.chaos.rank_pool import RankPool
from moe_rt.chaos.table import origin, span
from moe_rt.testing.output import replace_section, section_marks

RANKS, FAULTY_RANK = 3, 1  # some deadlocks show from three ranks on only
SECOND_STEP = {"dispatch": 5, "combine": 6, "backward": 7}  # the ops with the fault, by number
COMMAND = "python -m moe_rt.chaos.matrix --write docs/reliability.md"


def injected_faults() -> Iterator[InjectedFault]:
    """All of the matrix; the faulty rank is always the same."""
    for at in POINTS_OF_ONE_HOST:
        ops = SECOND_STEP.values() if at in IN_OPS else [SECOND_STEP["dispatch"] if at in BETWEEN_OPS else 1]
        for op in ops:
            for do in SURVIVORS_RAISE:
                if do != "corrupt" or at == "after_payload":
                    yield InjectedFault(FAULTY_RANK, op, at, do)


def measure(progress: Callable[[InjectedFault], None]) -> list[Outcome[InjectedFault]]:
    """Runs the matrix; about a minute on two cores."""
    outcomes = []
    with RankPool(RANKS) as pool:
        for fault in injected_faults():
            progress(fault)
            outcomes.append(fault.run(pool))
    return outcomes


def classes(outcomes: list[Outcome[InjectedFault]]) -> dict[str, dict[str, str]]:
    """{point: {action: what the survivors raised}}; a class that a rank has only been told of is not counted."""
    table: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        fault, row = outcome.trial, table.setdefault(outcome.trial.at, {})
        # Who publishes nonsense reads it too, and may be the first to notice.
        noticing = [r for r in outcome.reports if r != fault.rank or fault.do == "corrupt"]
        seen = {outcome.reports[r]["raised"] for r in noticing}
        already = set(filter(None, row.get(fault.do, "").split(" or ")))
        row[fault.do] = " or ".join(sorted(already | (seen - {"GroupPoisoned"} or seen)))
    return table


def times(outcomes: list[Outcome[InjectedFault]], do: str, at: str | None = None) -> list[float]:
    """Milliseconds until survivors raised, of one action, at one point or all."""
    chosen = (o for o in outcomes if o.trial.do == do and at in (None, o.trial.at))
    return [ms for outcome in chosen for ms in outcome.milliseconds]


def markdown(outcomes: list[Outcome[InjectedFault]]) -> str:
    """The table, and how it came about."""
    lines = [
        origin(RANKS, COMMAND),
        "Times run from when the faulty rank began its op until a survivor had raised, median / worst; after a kill",
        "the kernel first takes the process apart, and `post_rendezvous` includes making the buffer.",
        "",
        "| Point | " + " | ".join(f"`{do}`" for do in SURVIVORS_RAISE) + " | ms after kill | ms after raise |",
        "|---|" + "---|" * (len(SURVIVORS_RAISE) + 2),
    ]
    for at, row in classes(outcomes).items():
        raised = " | ".join(row.get(do, "") for do in SURVIVORS_RAISE)
        lines.append(f"| `{at}` | {raised} | " + " | ".join(span(times(outcomes, d, at)) for d in _TIMED) + " |")
    of_all = "| ".join(span(times(outcomes, do)) + " " for do in _TIMED)
    lines.append("| all | " + "| " * len(SURVIVORS_RAISE) + of_all + "|")
    return "\n".join(lines)


_TIMED = ("kill", "raise")


def committed(text: str) -> dict[str, dict[str, str]]:
    """`classes` as a document states them."""
    begin, end = section_marks("matrix")
    table = text.partition(begin)[2].partition(end)[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    names = list(SURVIVORS_RAISE)
    return {
        cells[0].strip(" `"): {n: c.strip() for n, c in zip(names, cells[1:], strict=False) if c.strip()}
        for cells in rows
    }


@click.command()
@click.option("--write", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Where the table stands.")
def main(write: Path | None) -> None:
    """Injects every fault of the matrix into groups of three ranks, and prints what the survivors raised."""
    outcomes = measure(lambda fault: click.echo(fault.spec, err=True))
    table, wrong = markdown(outcomes), [o for o in outcomes if o.complaints]
    click.echo(table)
    if write is not None and not wrong:
        replace_section(write, "matrix", table)
    document: dict[str, Any] = {"outcomes": [o.describe() for o in outcomes], "classes": classes(outcomes)}
    document["kill_ms"] = {"median": median(times(outcomes, "kill")), "worst": max(times(outcomes, "kill"))}
    click.echo(json.dumps(document, separators=(",", ":")))
    if wrong:
        raise click.ClickException("; ".join(f"{o.trial.text}: {', '.join(o.complaints)}" for o in wrong))


if __name__ == "__main__":
    main()
