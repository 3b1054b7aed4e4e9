"""The command `moe-rt plan`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from moe_rt.errors import InvalidConfig, MoeRtError, expect
from moe_rt.plan.answers import EFFICIENCY, Cluster, Layer, Plan, make_plan
from moe_rt.plan.ask import QUESTIONS, Answer, Setting
from moe_rt.plan.calibration import Library, load, published
from moe_rt.plan.distinct import Array
from moe_rt.plan.export import export as write_export
from moe_rt.plan.models import MODELS, Model, find_model
from moe_rt.plan.routing import capacity_advice, load_trace, popularity, shares_of
from moe_rt.plan.systems import CPU

ABOUT = """Predict the time, memory and overflow risk of expert parallelism, and choose a configuration.

\b
  moe-rt plan --model deepseek-v3 --gpus 64 --tokens 4096           one plan
  moe-rt plan --model config.json --gpus 16 --tokens 128 --json     of a Hugging Face model, for scripts
  moe-rt plan --model qwen3-30b-a3b --gpus 8 --tokens 4096 --tune   search with a learned predictor
  moe-rt plan --model config.json --gpus 2 --tokens 256 --real      search by runs on this machine
  moe-rt plan --model deepseek-v3 --gpus 64 --tokens 64 --measured dispatch=350   why is it slower?
  moe-rt plan ask ep --model deepseek-v3 --gpus 16 --tokens 128     a question, by name
  moe-rt plan compare A.json B.json                                 two plans next to each other
  moe-rt plan --hardware cpu --calibration calibration.json ...     CPU ranks of this machine
  moe-rt plan systems                                               what is calibrated, from which source
  moe-rt calibrate                                                  calibrate this machine
"""


def _reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the package's errors into messages of the command line."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except MoeRtError as error:
            raise click.ClickException(str(error)) from error

    return run


def _subject(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("--model", help=f"A config.json, or one of {', '.join(MODELS)}."),
        click.option("--gpus", type=int, help="GPUs of the cluster."),
        click.option("--tokens", type=int, help="Tokens of each GPU in one step."),
        click.option("--hardware", default="H100 SXM + 400G IB", show_default=True, help="GPU and network, in words."),
        click.option("--domain", default=8, show_default=True, help="GPUs that fast links join."),
        click.option("--library", default="", help="Library whose calibration is meant; default: by the GPU."),
        click.option("--sigma", default=0.0, show_default=True, help="Unevenness of experts: log-normal popularity."),
        click.option(
            "--efficiency", default=EFFICIENCY, show_default=True, help="Share of the peak that grouped products reach."
        ),
        click.option("--json", "as_json", is_flag=True, help="One JSON document."),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def _times(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return ops and their microseconds of texts such as dispatch=350."""
    times = []
    for text in texts:
        op, _, given = text.partition("=")
        if op not in ("dispatch", "combine") or not given.replace(".", "", 1).isdecimal():
            raise click.UsageError(f"--measured: got {text!r}, expected dispatch=MICROSECONDS or combine=MICROSECONDS")
        times.append((op, float(given)))
    return times


@click.group(invoke_without_command=True, help=ABOUT)
@_subject
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Recorded topk_idx.")
@click.option("--capacity-factor", type=float, help="State the risk of this capacity factor.")
@click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="More calibrations.")
@click.option("--guess", is_flag=True, help="Predict links that no calibration covers, with a very wide interval.")
@click.option("--measured", multiple=True, metavar="OP=US", callback=_times, help="Explain a measured time.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw times and memory: .svg or .png.")
@click.option("--export", type=click.Path(path_type=Path), help="AIConfigurator: FILE.csv|parquet. CollectiveX: DIR.")
@click.option("--tune", is_flag=True, help="Search the knobs with a learned predictor, on the simulator.")
@click.option("--real", is_flag=True, help="Search by running moe-rt bench on this machine; --gpus are its CPU ranks.")
@click.option("--trials", default=40, show_default=True, help="With --tune: trials.")
@click.pass_context
@_reporting
def plan(
    context: click.Context,
    model: str | None,
    gpus: int | None,
    tokens: int | None,
    hardware: str,
    domain: int,
    library: str,
    sigma: float,
    efficiency: float,
    as_json: bool,
    trace: Path | None,
    capacity_factor: float | None,
    calibration: Path | None,
    guess: bool,
    measured: list[tuple[str, float]],
    plot: Path | None,
    export: Path | None,
    tune: bool,
    real: bool,
    trials: int,
) -> None:
    """Predict one plan; see ABOUT."""
    if context.invoked_subcommand is not None:
        return None
    if all(context.get_parameter_source(name) is not ParameterSource.COMMANDLINE for name in context.params):
        return click.echo(context.get_help())
    if model is None or gpus is None or tokens is None:
        raise click.UsageError("a plan needs --model, --gpus and --tokens")
    if as_json and measured:
        raise click.UsageError("--measured: got it with --json, expected one of them: its answer is a sentence")
    known = published() if calibration is None else Library([*load(calibration), *published().calibrations])
    known = Library(known.calibrations, guess)
    if real:
        return _tune_real(find_model(model), gpus, tokens, trials=trials, as_json=as_json)
    if hardware == "cpu":
        hardware = _own_machine(known)
    domain = gpus if hardware.startswith(CPU) else domain
    sizes, cluster = find_model(model), Cluster(gpus, hardware, domain, library, efficiency)
    shares = popularity(sizes.experts, sigma)
    if trace is not None:
        shares = shares_of(load_trace(trace, sizes.experts), sizes.experts)
    if tune:
        return _tune(sizes, cluster, tokens, shares, trials=trials, as_json=as_json)
    made = make_plan(sizes, cluster, tokens, shares=shares, capacity_factor=capacity_factor, library=known)
    if plot is not None:
        from moe_rt.plan.plots import draw_plan  # matplotlib takes a second

        draw_plan(made, shares, plot, known)
    if export is not None:
        click.echo(write_export(made, export, known), err=True)
    if as_json:
        return click.echo(json.dumps(made.document()))
    _show(made)
    if capacity_factor is not None:
        ep_size = made.layers[0].configuration.ep_size
        click.echo(capacity_advice(capacity_factor, tokens, sizes.topk, ep_size, shares))
    for op, us in measured:
        click.echo(explain(made.layers[0], op, us))
    return None


def _tune(model: Model, cluster: Cluster, tokens: int, shares: Array, *, trials: int, as_json: bool) -> None:
    """Search the knobs by predictions."""
    from moe_rt.plan.tune import plan_judge, plan_space, tune

    space = plan_space(model, cluster, tokens)
    tune(space, plan_judge(model, cluster, tokens, shares, space), trials=trials, as_json=as_json)


def _tune_real(model: Model, ranks: int, tokens: int, *, trials: int, as_json: bool) -> None:
    """Search the knobs of CPU ranks by runs on this machine."""
    from moe_rt.plan.tune import tune

    bench = import_module("moe_rt.lab.bench.tune")  # by name: the benchmark's package is above this one
    space = bench.real_space(model, ranks, tokens)
    tune(space, bench.real_judge(model, ranks, tokens, space), trials=trials, as_json=as_json)


def _own_machine(known: Library) -> str:
    """Return the name of this machine, whose CPU ranks must be calibrated."""
    info, bench = import_module("moe_rt.info"), import_module("moe_rt.lab.bench.calibrate")  # both are above this one
    own = bench.machine_name(info.machine_card())
    names = sorted({one.hardware for one in known.calibrations if one.hardware.startswith(CPU)})
    got = f"cpu, and calibrations of {' and '.join(names) or 'no CPU'}"
    expected = f"one of this machine, {own}, in --calibration FILE (moe-rt calibrate); or another's name as --hardware"
    expect(own in names, "hardware", got, expected)
    return str(own)


@plan.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_reporting
def compare(files: tuple[Path, ...]) -> None:
    """Show the best configurations of plans that --json wrote, next to each other."""
    expect(len(files) > 1, "files", len(files), "at least two documents of moe-rt plan --json")
    table = Table(title="best configuration of each plan: one layer, us")
    for name in ("plan", "model", "hardware", "EP", "mode", "payload", "dispatch", "experts", "combine", "step", "GB"):
        table.add_column(name)
    steps = {}
    for path in files:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            best = document["layers"][0]
            one, where = best["configuration"], document["cluster"]
            steps[path.stem] = best["step_us"] / one["tokens"]
            times = (best["dispatch"]["us"], best["experts_us"], best["combine"]["us"], best["step_us"])
            table.add_row(
                path.stem, document["model"]["name"], f"{where['gpus']} x {where['hardware']}", str(one["ep_size"]),
                one["mode"], one["payload"], *(f"{us:.1f}" for us in times), f"{best['memory_bytes'] / 1e9:.1f}",
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidConfig(f"plan {path}: got {error!r}, expected a document of moe-rt plan --json") from error
    Console(width=140).print(table)
    fastest, slowest = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    click.echo(f"{fastest} takes least per token: {steps[fastest]:.3g} us; {slowest} {steps[slowest]:.3g} us")


def _show(made: Plan) -> None:
    console = Console(width=120)
    table = Table(title=f"{made.model.name} on {made.cluster.gpus} x {made.cluster.hardware}: one layer, us")
    for name in (
        "EP",
        "mode",
        "payload",
        "chunks",
        "dispatch",
        "experts",
        "combine",
        "step (p5 to p95)",
        "GB",
        "limit",
    ):
        table.add_column(name)
    for layer in made.best:
        one = layer.configuration
        interval = f"{layer.step_us:.0f} ({layer.p5_us:.0f} to {layer.p95_us:.0f})"
        parts = (f"{us:.1f}" for us in (layer.dispatch.us, layer.experts_us, layer.combine.us))
        memory = f"{layer.memory_bytes / 1e9:.1f}"
        table.add_row(
            str(one.ep_size), one.mode, one.payload, str(one.chunks), *parts, interval, memory, layer.limits
        )  # fmt: skip
    console.print(table)
    for layer in made.best:
        console.print(
            f"EP {layer.configuration.ep_size}, {layer.configuration.mode}: {made.why(layer)}", soft_wrap=True
        )
    best = made.layers[0]
    total = best.step_us * made.model.layers / 1e3
    console.print(f"{made.model.layers} layers: {total:.1f} ms; calibrated by {best.dispatch.basis}", soft_wrap=True)
    names: dict[str, list[str]] = {}
    for name, reason in made.refused.items():
        names.setdefault(reason, []).append(name)
    for reason, left_out in list(names.items())[:3]:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        console.print(f"left out {left_out[0]}{more}: {reason}", soft_wrap=True)


# Causes that make an op slower than its calibration, by mode, and how each shows.
CAUSES = {
    "low_latency": (
        "a cold start, if the first calls are slowest: time after several calls, between events of one stream",
        "a late rank, if the other op is as much faster: each waits for all ranks",
        "a slower link class, if few tokens are within the interval and many are not (NVLink, or IB to every GPU?)",
    ),
    "normal": (
        "few SMs, if the op has about {sms:.0f} of 24 (num_sms)",
        "allocation, if the first calls are slowest: received rows have another size in each step",
        "a late rank, if the other op is as much faster: each waits for all ranks",
        "a slower link class, if few tokens are within the interval and many are not (NVLink, or IB to every GPU?)",
    ),
    "copies": (
        "other programs, or ranks that share a core: compare the load with the number of cores",
        "malloc, if large batches are slow and small ones are not: fresh pages (moe-rt bench --malloc recycle, system)",
        "another machine state, if `moe-rt calibrate` now gives other parameters",
    ),
}


def explain(layer: Layer, op: str, us: float) -> str:
    """Say what can explain a measured time of dispatch or combine, beyond the predicted interval."""
    estimate = {"dispatch": layer.dispatch, "combine": layer.combine}[op]
    ratio = us / estimate.us
    if us < estimate.p5_us:
        return (
            f"{op}: measured {us:g} us is below the interval from {estimate.p5_us:.0f} us: is the op over when timed?"
        )
    if us <= estimate.p95_us:
        return f"{op}: measured {us:g} us is within the interval up to {estimate.p95_us:.0f} us"
    causes = [
        f"skew, if the busiest rank receives {ratio * layer.busiest:.1f} times an even share (max/mean of your counts)",
        *CAUSES[layer.configuration.mode],
    ]
    usual = f"{op}: measured {us:g} us is {ratio:.1f} times the prediction. What explains it:"
    return "\n  ".join([usual, *(text.format(sms=24 / ratio) for text in causes)])


@plan.command(help="Answer a question by name: " + "; ".join(f"{n}: {q.__doc__}" for n, q in QUESTIONS.items()))
@click.argument("question", type=click.Choice(list(QUESTIONS)))
@_subject
@_reporting
def ask(
    question: str, model: str | None, gpus: int | None, tokens: int | None, hardware: str, domain: int, library: str,
    sigma: float, efficiency: float, as_json: bool,
) -> None:  # fmt: skip
    """Answer a question by name."""
    if model is None or gpus is None or tokens is None:
        raise click.UsageError("ask needs --model, --gpus and --tokens")
    cluster = Cluster(gpus, hardware, domain, library, efficiency)
    answer = QUESTIONS[question](Setting(find_model(model), cluster, tokens, sigma or 1.0))
    if as_json:
        click.echo(
            json.dumps({"question": question, "answer": answer.text, "columns": answer.columns, "rows": answer.rows})
        )
        return
    _show_answer(question, answer)


def _show_answer(question: str, answer: Answer) -> None:
    table = Table(title=QUESTIONS[question].__doc__)
    for name in answer.columns:
        table.add_column(name)
    for row in answer.rows:
        table.add_row(*map(str, row))
    Console(width=120).print(table)
    click.echo(answer.text)


@plan.command()
@_reporting
def systems() -> None:
    """List the calibrated systems with their sources and errors."""
    table = Table()
    for name in ("system", "op", "rows", "nodes", "median error", "p95", "source"):
        table.add_column(name, overflow="fold")
    for one in published().calibrations:
        nodes = f"{one.least_nodes} to {one.most_nodes}" if one.most_nodes > 1 else "1"
        name = f"{one.library}, {one.hardware}, {one.mode}"
        errors = (f"{one.median_error:.1%}", f"{one.p95_error:.1%}")
        table.add_row(name, one.op, str(len(one.residuals)), nodes, *errors, one.source)
    Console(width=140).print(table)
