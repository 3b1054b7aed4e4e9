"""The command `moe-rt chaos`: random trials of working groups in sequence, and a count of leaked resources."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click

from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.info import machine_card
from moe_rt.lab.chaos.injected_fault import POINTS_OF_ONE_HOST, STEPS, SURVIVORS_RAISE, InjectedFault
from moe_rt.lab.chaos.node_pool import NodePool
from moe_rt.lab.chaos.node_trials import RAISED, Misbehaviour, draw_kill, draw_link_fault, draw_stop
from moe_rt.lab.chaos.outcome import Outcome, Trial
from moe_rt.lab.chaos.rank_pool import RankPool
from moe_rt.lab.chaos.trials import Evaluation, Freeze, Interrupt, Scarcity
from moe_rt.lab.chaos.worker import OPS_OF_A_STEP
from moe_rt.lab.cluster.cluster import NETNS
from moe_rt.lab.testing.resources import held, left_of

KILLS, STOPS, LINKS = ("kill", "ranks", "node"), ("stop", "pause"), ("cut", "flap", "blink", "slow", "lossy")
ACTIONS_ON_NODES = (*KILLS, *STOPS, *LINKS, *RAISED, "interrupt")


def draw_on_nodes(action: str, pace: random.Random, nodes: Sequence[int]) -> Trial[NodePool]:
    """Draw any rank, node and moment."""
    if action in KILLS:
        return draw_kill(action, pace, sum(nodes))
    if action in STOPS:
        return draw_stop(action, pace, sum(nodes))
    if action in LINKS:
        return draw_link_fault(action, pace, len(nodes))
    if action in RAISED:
        return Misbehaviour.draw(action, pace, sum(nodes))
    return Interrupt.draw(pace, sum(nodes))


# The last op of a fault: survivors must notice in a later op.
LAST_OP = OPS_OF_A_STEP * (STEPS - 1)
OTHERS: dict[str, Callable[[random.Random, int], Trial[RankPool]]] = {
    "freeze": Freeze.draw,
    "interrupt": Interrupt.draw,
    "limit": Scarcity.draw,
    "evaluate": Evaluation.draw,
}
ACTIONS_ON_ONE_HOST = (*SURVIVORS_RAISE, "heavy", *OTHERS)


def draw_on_one_host(action: str, pace: random.Random, ranks: int, stop_timeout_s: float) -> Trial[RankPool]:
    """Draw a trial. A fault has any compatible rank, point and op."""
    if action in OTHERS:
        return OTHERS[action](pace, ranks)
    at = "after_payload" if action == "corrupt" else pace.choice(POINTS_OF_ONE_HOST)
    return InjectedFault(
        pace.randrange(ranks),
        pace.randint(1, LAST_OP),
        at,
        "kill" if action == "heavy" else action,
        seconds=round(pace.uniform(0.0, 0.1), 3),
        ballast_mib=pace.randint(256, 1024) if action == "heavy" else 0,
        stop_timeout_s=stop_timeout_s,
    )


Pool = TypeVar("Pool", bound=RankPool)
Draw = Callable[[str, random.Random], Trial[Pool]]  # called with an action's name


def run_chaos(
    make_pool: Callable[[], Pool],
    draw: Draw[Pool],
    actions: Sequence[str],
    rounds: int,
    seed: int,
    progress: Callable[[int, Outcome[Any]], None],
) -> dict[str, Any]:
    """Run the rounds and return a document. Its `complaints` are empty if nothing hung, leaked or went wrong."""
    pace, before, start = random.Random(seed), _held(), time.monotonic()
    outcomes: list[Outcome[Any]] = []
    with make_pool() as pool:
        for i in range(rounds):
            outcomes.append(draw(pace.choice(actions), pace).run(pool))
            progress(i, outcomes[-1])
        kept = pool.kept()
    seconds = time.monotonic() - start
    left = left_of(before, _held) | kept
    complaints = [f"round {i}, {o.trial.text}: {text}" for i, o in enumerate(outcomes) for text in o.complaints]
    complaints += [f"{count} {name} left behind" for name, count in left.items() if count > 0]
    return {
        "rounds": rounds,
        "seed": seed,
        "seconds_per_round": round(seconds / rounds, 3),
        "actions": {do: _summary([o for o in outcomes if o.trial.action == do]) for do in actions},
        "left_behind": left,
        "complaints": complaints,
        "wrong": [o.describe() for o in outcomes if o.complaints],
    }


def _summary(outcomes: list[Outcome[Any]]) -> dict[str, float]:
    times = [ms for outcome in outcomes for ms in outcome.milliseconds]
    noticed = {"median_ms": round(median(times), 2), "worst_ms": round(max(times), 2)} if times else {}
    return {"rounds": len(outcomes), **noticed}


def _held() -> dict[str, int]:
    """Count resources of this process that could leak; every rank counts its own."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    namespaces = list(NETNS.glob(f"*_{os.getpid()}-*"))
    return held() | {"processes": len(children), "namespaces": len(namespaces)}


NAMES = tuple(dict.fromkeys((*ACTIONS_ON_ONE_HOST, *ACTIONS_ON_NODES)))


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
    document. The exit status is 1 if a rank hung, raised another error than it must, leaked something, or got
    wrong data.
    """
    possible = ACTIONS_ON_NODES if nodes else ACTIONS_ON_ONE_HOST
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
            done = run_chaos(partial(NodePool, nodes), partial(draw_on_nodes, nodes=nodes), *how)
            of_all |= {"nodes": nodes} | done
        else:
            draw = partial(draw_on_one_host, ranks=ranks, stop_timeout_s=timeout)
            done = run_chaos(partial(RankPool, ranks), draw, *how)
            of_all |= {"ranks": ranks} | done
    except (InvalidConfig, MissingPackage) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(of_all, separators=(",", ":")))
    if of_all["complaints"]:
        raise click.ClickException("; ".join(of_all["complaints"]))
