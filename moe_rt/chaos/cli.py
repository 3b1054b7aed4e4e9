"""The command `moe-rt chaos`."""

from __future__ import annotations

import json
from typing import Any

import click

from moe_rt.chaos import rounds as rounds_of
from moe_rt.chaos.outcome import Outcome
from moe_rt.testing.host_info import machine_card


@click.command()
@click.option("--ranks", type=click.IntRange(min=2), default=3, show_default=True, help="Processes.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Trials of a group.")
@click.option("--seed", default=0, show_default=True, help="Of what happens where.")
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=0.5, show_default=True, help="timeout_s of a stop's group."
)
@click.option(
    "--action",
    "actions",
    type=click.Choice(list(rounds_of.NAMES)),
    multiple=True,
    default=list(rounds_of.NAMES),
    help="Only these; may be repeated.",
)
def chaos(ranks: int, rounds: int, seed: int, timeout: float, actions: tuple[str, ...]) -> None:
    """Let random things happen to groups that work, and check what every rank does.

    Every round makes a group of CPU ranks, which run steps and check every result. One rank is killed, also with much
    memory, stopped, delayed, made to fail or lie, interrupted, or held to a limit; or all are frozen for a while; or
    evaluate between training steps. Who died is started anew. The last line is one JSON document. The exit status is 1
    if a rank hung, raised something else than it must, left something behind, or got wrong data.
    """

    def show(i: int, outcome: Outcome[Any]) -> None:
        raised = "  ".join(f"{rank}: {report['raised']}" for rank, report in sorted(outcome.reports.items()))
        noticed = f"{max(outcome.milliseconds):7.1f} ms" if outcome.milliseconds else ""
        click.echo(f"{i:4}  {outcome.trial.text:62} {raised:58} {noticed:>10}  {'; '.join(outcome.complaints)}")

    document = rounds_of.chaos(ranks, rounds, seed, timeout, show, actions)
    click.echo(json.dumps({"machine": machine_card(), **document}, separators=(",", ":")))
    if document["complaints"]:
        raise click.ClickException("; ".join(document["complaints"]))
