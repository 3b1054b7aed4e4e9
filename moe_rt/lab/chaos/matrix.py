"""The fault matrix: every point, every action and every kind of op, as the table in docs/reliability.md.

    python -m moe_rt.lab.chaos.matrix --write docs/reliability.md

The last line is one JSON document; the exit status is 1 if a survivor raised anything but the expected error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click

from moe_rt.diagnostics.output import replace_section, section_marks
from moe_rt.lab.chaos.injected_fault import BETWEEN_OPS, IN_OPS, POINTS_OF_ONE_HOST, SURVIVORS_RAISE, InjectedFault
from moe_rt.lab.chaos.outcome import Outcome, origin, span
from moe_rt.lab.chaos.rank_pool import RankPool

RANKS, FAULTY_RANK = 3, 1  # some deadlocks need three ranks
SECOND_STEP = {"dispatch": 5, "combine": 6, "backward": 7}  # op numbers that carry the fault
COMMAND = "python -m moe_rt.lab.chaos.matrix --write docs/reliability.md"


def injected_faults() -> Iterator[InjectedFault]:
    """All faults of the matrix; the faulty rank is always the same."""
    for at in POINTS_OF_ONE_HOST:
        ops = SECOND_STEP.values() if at in IN_OPS else [SECOND_STEP["dispatch"] if at in BETWEEN_OPS else 1]
        for op in ops:
            for do in SURVIVORS_RAISE:
                if do != "corrupt" or at == "after_payload":
                    yield InjectedFault(FAULTY_RANK, op, at, do)


def measure(progress: Callable[[InjectedFault], None]) -> list[Outcome[InjectedFault]]:
    """Run the matrix; it takes about a minute on two cores."""
    outcomes = []
    with RankPool(RANKS) as pool:
        for fault in injected_faults():
            progress(fault)
            outcomes.append(fault.run(pool))
    return outcomes


def classes(outcomes: list[Outcome[InjectedFault]]) -> dict[str, dict[str, str]]:
    """{point: {action: errors of the survivors}}. Errors that a rank was only notified of are not counted."""
    table: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        fault, row = outcome.trial, table.setdefault(outcome.trial.at, {})
        # The rank that publishes corrupt data also reads it, and may be the first to notice.
        noticing = [r for r in outcome.reports if r != fault.rank or fault.do == "corrupt"]
        seen = {outcome.reports[r]["raised"] for r in noticing}
        already = set(filter(None, row.get(fault.do, "").split(" or ")))
        row[fault.do] = " or ".join(sorted(already | (seen - {"GroupPoisoned"} or seen)))
    return table


def times(outcomes: list[Outcome[InjectedFault]], do: str, at: str | None = None) -> list[float]:
    """Milliseconds until survivors raised, for one action, at one point or all."""
    chosen = (o for o in outcomes if o.trial.do == do and at in (None, o.trial.at))
    return [ms for outcome in chosen for ms in outcome.milliseconds]


def markdown(outcomes: list[Outcome[InjectedFault]]) -> str:
    """The table and its origin."""
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
    """Parse `classes` from a document's table."""
    begin, end = section_marks("matrix")
    table = text.partition(begin)[2].partition(end)[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    names = list(SURVIVORS_RAISE)
    return {
        cells[0].strip(" `"): {n: c.strip() for n, c in zip(names, cells[1:], strict=False) if c.strip()}
        for cells in rows
    }


@click.command()
@click.option(
    "--write", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Document that holds the table."
)
def main(write: Path | None) -> None:
    """Inject every fault of the matrix into groups of three ranks, and print the errors of the survivors."""
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
