"""`moe-rt bench --op serve`: the options that it takes, and its output."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from moe_rt.bench.launch import RankFailed
from moe_rt.bench.serving.rank import CONTESTANTS
from moe_rt.bench.serving.run import Model, Settings, run
from moe_rt.bench.serving.table import show_kills, show_load
from moe_rt.bench.table import show_machine
from moe_rt.errors import MoeRtError
from moe_rt.testing.output import console

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
        contestants=given["contestants"].split(",") if "contestants" in given else CONTESTANTS,
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
