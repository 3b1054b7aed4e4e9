"""The command `moe-rt chaos`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import click

from moe_rt.chaos import on_nodes, on_one_host
from moe_rt.chaos.node_pool import NodePool
from moe_rt.chaos.outcome import Outcome
from moe_rt.chaos.rank_pool import RankPool
from moe_rt.chaos.rounds import chaos as run_chaos
from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.testing.host_info import machine_card

NAMES = tuple(dict.fromkeys((*on_one_host.ACTIONS, *on_nodes.ACTIONS)))


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    parts = text.split(",") if text else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) == 1:
        raise click.BadParameter(f"got {text!r}, expected the ranks of two nodes or more, such as 2,2")
    return [int(part) for part in parts]


@click.command()
@click.option("--ranks", type=click.IntRange(min=2), default=3, show_default=True, help="Number of processes.")
@click.option("--nodes", callback=_numbers, help="Ranks on each emulated node, such as 2,2; needs root.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Number of trials.")
@click.option("--seed", default=0, show_default=True, help="Seed of the trials.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=0.5,
    show_default=True,
    help="timeout_s of a stopped rank's group.",
)
@click.option("--action", "actions", type=click.Choice(NAMES), multiple=True, help="Use only this; may be repeated.")
def chaos(ranks: int, nodes: list[int], rounds: int, seed: int, timeout: float, actions: tuple[str, ...]) -> None:
    """Inject random faults into working groups, and check what every rank does.

    Every round makes a group of CPU ranks, which run steps and check every result. One rank is killed, also while it
    holds much memory, stopped, delayed, made to fail or to publish corrupt data, interrupted, or given too few
    resources; or all ranks are frozen for a while; or they evaluate between training steps. With --nodes, ranks are on
    emulated nodes, and nodes die and links go down as well. Dead ranks are started again. The last line is one JSON
    document. The exit status is 1 if a rank hung, raised another error than it must, left something behind, or got
    wrong data.
    """
    possible = on_nodes.ACTIONS if nodes else on_one_host.ACTIONS
    if odd := set(actions) - set(possible):
        raise click.BadParameter(f"got {sorted(odd)}, expected of {', '.join(possible)}", param_hint="--action")

    def show(i: int, outcome: Outcome[Any]) -> None:
        raised = "  ".join(f"{rank}: {report['raised']}" for rank, report in sorted(outcome.reports.items()))
        noticed = f"{max(outcome.milliseconds):7.1f} ms" if outcome.milliseconds else ""
        click.echo(f"{i:4}  {outcome.trial.text:62} {raised:58} {noticed:>10}  {'; '.join(outcome.complaints)}")

    of_all: dict[str, Any] = {"machine": machine_card()}
    how = (actions or possible, rounds, seed, show)
    try:
        if nodes:
            done = run_chaos(partial(NodePool, nodes), partial(on_nodes.draw, nodes=nodes), *how)
            of_all |= {"nodes": nodes} | done
        else:
            draw = partial(on_one_host.draw, ranks=ranks, stop_timeout_s=timeout)
            done = run_chaos(partial(RankPool, ranks), draw, *how)
            of_all |= {"ranks": ranks} | done
    except (InvalidConfig, MissingPackage) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(of_all, separators=(",", ":")))
    if of_all["complaints"]:
        raise click.ClickException("; ".join(of_all["complaints"]))
