"""The command `moe-rt bench`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import Progress

from moe_rt.config.options import HeapKind
from moe_rt.diagnostics.output import console, make_directory
from moe_rt.errors import MoeRtError
from moe_rt.extras import require
from moe_rt.lab.bench.cases import CASES, DEFAULT_CASE, DTYPES, OPS, Case
from moe_rt.lab.bench.contestants import ON_NODES, ON_ONE_HOST
from moe_rt.lab.bench.inputs import ROUTING_HELP
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.lab.bench.run import Settings, run, sweep_tokens
from moe_rt.lab.bench.serving import command as serving
from moe_rt.lab.bench.table import show_machine, show_run
from moe_rt.lab.bench.trace import write_traces


class Numbers(click.ParamType):
    """Positive integers separated by commas. An empty value gives an empty tuple."""

    name = "n,n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        words = [word for word in value.split(",") if word]
        if not all(word.isdecimal() and int(word) for word in words):
            self.fail(f"got {value!r}, expected positive numbers with commas between them", param, ctx)
        return tuple(map(int, words))


def _size(name: str, what: str) -> Any:
    return click.option(f"--{name}", type=click.IntRange(min=1), help=f"{what}; default: the case's.")


def _together(*options: Any) -> Any:
    """One decorator for the options, in this order."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


_case_options = _together(
    click.option(
        "--case",
        "names",
        type=click.Choice(list(CASES)),
        metavar="NAME",
        multiple=True,
        default=[DEFAULT_CASE],
        show_default=True,
        help="Case to measure, from the list below; may be given several times. The next options change it.",
    ),
    click.option(
        "--op",
        type=click.Choice([*OPS, serving.OP]),
        help="pair is dispatch and combine; serve is vLLM, see `moe-rt docs benchmarks`; default: the case's.",
    ),
    _size("ranks", "Ranks, each on its own core if there are enough"),
    _size("tokens", "Tokens per rank"),
    _size("hidden", "Elements of a row"),
    _size("topk", "Experts of a token"),
    _size("experts", "Experts of the group"),
    _size("intermediate", "Inner size of the layer's experts"),
    click.option("--dtype", type=click.Choice(list(DTYPES)), help="Type of rows; default: the case's."),
    click.option("--routing", help=f"{ROUTING_HELP}; default: the case's."),
    click.option(
        "--heap",
        type=click.Choice(get_args(HeapKind)),
        help="CPU ranks: shm, ucx (processes), threads. With a GPU each: nvshmem, gin; all on one: loopback. Default: "
        "shm, or ucx with --nodes.",
    ),
    click.option(
        "--nodes",
        type=Numbers(),
        help="Emulated nodes with equal numbers of ranks, 2 each without --ranks; needs root. 2,4: both.",
    ),
    click.option(
        "--rate", help="With --nodes: send and receive limit of each, such as 200mbit,1gbit,unlimited for all three."
    ),
    click.option("--sweep", type=click.Choice(["tokens"]), help="Repeat a case at 1, 64, 128, ... tokens."),
    click.option(
        "--max-tokens", type=click.IntRange(min=64), default=8192, show_default=True, help="Last point of --sweep."
    ),
)
_measurement_options = _together(
    click.option(
        "--contestants",
        help=f"Contestants, by name or as package.module:Class; default: {','.join(ON_ONE_HOST)}, or with --nodes "
        f"{','.join(ON_NODES)}.",
    ),
    click.option(
        "--iters", type=click.IntRange(min=1), help="Iterations of each kind; default: 200, or 20 of large ops."
    ),
    click.option(
        "--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Untimed iterations first."
    ),
    click.option("--seed", default=0, show_default=True, help="Seed of inputs and routing."),
    click.option(
        "--malloc",
        type=click.Choice(["recycle", "system"]),
        default="recycle",
        show_default=True,
        help="Keep freed memory in the process, as on a GPU, or return it; for all contestants.",
    ),
    click.option("--cold", is_flag=True, help="Fill the caches with other data before each isolated iteration."),
    click.option("--sequences", type=Numbers(), help="serve: sequences to decode on each rank; default: 1,16,64."),
    click.option("--prompts", type=Numbers(), help="serve: tokens of the prompts to prefill; default: 512,2048."),
    click.option(
        "--kills", type=click.IntRange(min=1), help="serve: instead, kill one rank in each of this many servers."
    ),
    click.option("--report", type=click.Path(file_okay=False, path_type=Path), help="Write a page with plots there."),
    click.option(
        "--trace",
        type=click.Path(dir_okay=False, path_type=Path),
        help="layer: write a trace of moe_rt's steps there, which https://ui.perfetto.dev opens.",
    ),
)


@click.command(epilog="\b\nCases:\n" + "\n".join(f"  {case.title()}" for case in CASES.values()))
@_case_options
@_measurement_options
def bench(
    names: tuple[str, ...],
    sweep: str | None,
    max_tokens: int,
    nodes: tuple[int, ...] | None,
    rate: str | None,
    contestants: str | None,
    iters: int | None,
    warmup: int,
    seed: int,
    malloc: Any,
    cold: bool,
    report: Path | None,
    trace: Path | None,
    sequences: tuple[int, ...] | None,
    prompts: tuple[int, ...] | None,
    kills: int | None,
    **sizes: Any,
) -> None:
    """Time dispatch and combine against other implementations, in the same processes, and check every output.

    The last line is one JSON document. The exit status is 1 if any output was wrong.
    """
    given = _given(click.get_current_context())
    if sizes["op"] == serving.OP:
        return serving.serve(given)
    if others := [f"--{name}" for name in serving.ONLY_HERE if name in given]:
        raise click.UsageError(f"only --op serve takes {', '.join(others)}")
    if sweep is not None and len(names) > 1:
        raise click.UsageError("--sweep takes one case")
    if rate is not None and not nodes:
        raise click.UsageError("--rate needs --nodes")
    changed = {name: value for name, value in sizes.items() if value is not None}
    taking_part = tuple(contestants.split(",")) if contestants is not None else ON_NODES if nodes else ON_ONE_HOST
    settings = Settings(
        contestants=taking_part,
        iters=iters,
        warmup=warmup,
        seed=seed,
        malloc=malloc,
        cold=cold,
        trace=trace is not None,
    )
    try:
        write_page = None if report is None else _prepare_report(report)
        cases = [CASES[name].changed(**places, **changed) for name in names for places in _places(nodes, rate, changed)]
        if sweep is not None:
            cases = [point for case in cases for point in sweep_tokens(case, max_tokens)]
        if trace is not None and any(case.op != "layer" or case.on_gpu for case in cases):
            raise click.UsageError("--trace needs --op layer and CPU ranks")
        document = _run_with_progress(cases, settings, sweep is not None)
        if trace is not None:
            write_traces(document["runs"], trace)
    except (MoeRtError, RankFailed) as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    _show(document, write_page)
    if any(result["errors"] for measured in document["runs"] for result in measured["results"]):
        raise click.ClickException("an output was wrong; its times mean nothing")


def _prepare_report(directory: Path) -> Callable[[dict[str, Any]], Path]:
    """Return what writes a document's report there. It fails here rather than after the measurement."""
    require("matplotlib", "bench", "--report draws plots")
    make_directory(directory)
    from moe_rt.lab.bench.report import write_report  # takes a second, and fails where matplotlib is broken

    return lambda document: write_report(document, directory)


def _show(document: dict[str, Any], write_page: Callable[[dict[str, Any]], Path] | None) -> None:
    """Print the result, and write the report."""
    out = console()
    out.print(show_machine(document["machine"]))
    for measured in document["runs"]:
        out.print(show_run(measured))
    for name, slope in document.get("slopes", {}).items():
        out.print(f"{name}: time grows with tokens to the power {slope:.2f}")
    if write_page is not None:
        out.print(f"report: {write_page(document)}")
    click.echo(json.dumps(document, separators=(",", ":")))


def _places(nodes: tuple[int, ...] | None, rate: str | None, changed: dict[str, Any]) -> list[dict[str, Any]]:
    """Fields to change in a case, for each number of nodes and each rate of their links."""
    if not nodes:
        return [{}]
    rates = ["" if word == "unlimited" else word for word in (rate or "unlimited").split(",")]
    places = [{"heap": "ucx", "ranks": 2 * number, "nodes": number, "rate": each} for number in nodes for each in rates]
    return [{name: value for name, value in place.items() if name not in changed} for place in places]


def _given(context: click.Context) -> dict[str, Any]:
    """Options given on the command line."""
    written = ParameterSource.COMMANDLINE
    return {name: value for name, value in context.params.items() if context.get_parameter_source(name) is written}


def _run_with_progress(cases: list[Case], settings: Settings, sweep: bool) -> dict[str, Any]:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=len(cases))
        return run(cases, settings, sweep, lambda part: bar.advance(task, part))
