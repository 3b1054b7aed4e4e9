"""`moe-rt bench --op serve`: the options that it takes, and its output."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from moe_rt.diagnostics.output import console
from moe_rt.errors import MoeRtError
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.lab.bench.serving.loads import ratio
from moe_rt.lab.bench.serving.rank import contestants_here
from moe_rt.lab.bench.serving.run import Model, Settings, run
from moe_rt.lab.bench.table import show_machine, time

COLUMNS = ("tokens/s", "prepare + finalize p50", "p90", "share of the time", "adapter's Python", "time / moe_rt")


def show_load(run: dict[str, Any]) -> RenderableType:
    table = Table(title=run["title"], title_justify="left")
    table.add_column("contestant", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("as stock's", justify="right")
    table.add_column("answers")
    for result in run["results"]:
        table.add_row(*_cells(run, result), "[bold red]WRONG" if result["errors"] else "ok")
    errors = (f"{result['contestant']}: {error}" for result in run["results"] for error in result["errors"])
    return Group(table, *(Text(error) for error in errors), Text())


def show_kills(kills: dict[str, Any]) -> RenderableType:
    times = ", ".join(f"{ms:.0f}" for ms in kills["ms"])
    return Text(
        f"from SIGKILL of a rank until all of its server's {kills['requests']} requests had ended with an HTTP error: "
        f"median {kills['median']:.0f} ms, worst {kills['worst']:.0f} ms of {len(kills['ms'])}: {times}"
    )


def _cells(run: dict[str, Any], result: dict[str, Any]) -> list[str]:
    layer, adapter, times = result.get("layer_us"), result.get("adapter_us"), ratio(run, result)
    return [
        result["contestant"],
        f"{result['tokens_per_s']:.4g}",
        time(layer["p50"]) if layer else "",
        time(layer["p90"]) if layer else "",
        f"{result['share']:.1f}%" if layer else "",
        time(adapter["p50"]) if adapter else "",
        "" if times is None else f"{times:.2f}",
        f"{result['same']} of {run['load']['ranks'] * run['load']['sequences']}",
    ]


OP = "serve"
MODEL = ("hidden", "topk", "experts", "intermediate")
ONLY_HERE = ("sequences", "prompts", "kills")
TAKEN = ("op", "ranks", *MODEL, *ONLY_HERE, "contestants", "iters", "seed")


def serve(given: dict[str, Any]) -> None:
    """Measure and print. `given` holds the options on the command line. The exit status is 1 if an answer was wrong."""
    refused = [f"--{name.replace('_', '-')}" for name in given if name not in TAKEN]
    if refused:
        raise click.UsageError(f"--op serve does not take {', '.join(refused)}")
    settings = Settings(
        ranks=given.get("ranks", 2),
        model=Model(**{name: given[name] for name in MODEL if name in given}),
        contestants=given["contestants"].split(",") if "contestants" in given else contestants_here(),
        sequences=given.get("sequences", (1, 16, 64)),
        prompts=given.get("prompts", (512, 2048)),
        turns=given.get("iters", 5),
        kills=given.get("kills", 0),
        seed=given.get("seed", 0),
    )
    parts = 1 if settings.kills else len(settings.sequences) + len(settings.prompts)
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("serving", total=parts)
            document = run(settings, lambda part: bar.advance(task, part))
    except (MoeRtError, RankFailed) as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    out = console()
    out.print(show_machine(document["machine"]))
    for measured in document.get("runs", []):
        out.print(show_load(measured))
    if "kills" in document:
        out.print(show_kills(document["kills"]))
    click.echo(json.dumps(document, separators=(",", ":")))
    if any(result["errors"] for measured in document.get("runs", []) for result in measured["results"]):
        raise click.ClickException("an answer was wrong; its times mean nothing")
