"""The command `moe-rt gpucheck`. Heavy modules are imported when it is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_rt.errors import MoeRtError
from moe_rt.lab.check.steps import STEPS, Check

if TYPE_CHECKING:
    from moe_rt.lab.check.run import Run


def _sizes(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Parse the numbers of virtual ranks."""
    if text is None:
        return None
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(f"got {text!r}, expected numbers of ranks such as 1,2,8")
    return tuple(int(word) for word in words)


@click.command(epilog="\b\nSteps:\n" + "\n".join(f"  {step.name:12} {step.title}" for step in STEPS.values()))
@click.option("--device", default="cuda:0", show_default=True, help="GPU to check.")
@click.option(
    "--report", type=click.Path(file_okay=False, path_type=Path), help="Write report.json and report.md there."
)
@click.option(
    "--only", type=click.Choice(list(STEPS)), metavar="STEP", multiple=True, help="Step to run; default: all."
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Also run one process on each of this many GPUs.",
)
@click.option("--budget", type=click.FloatRange(min=1), metavar="SECONDS", help="Time for all steps together.")
@click.option("--sizes", callback=_sizes, metavar="R,R", help="Numbers of virtual ranks to try, such as 1,2.")
@click.option("--quick", is_flag=True, help="Run fewer cases and iterations.")
@click.option("--compile-only", is_flag=True, help="Compile the kernels for each --arch and read their PTX; no GPU.")
@click.option(
    "--emulated",
    "on_cpu",
    is_flag=True,
    help="Rehearse the steps in a checkout, with small sizes: kernels are executed on the CPU; no GPU.",
)
@click.option("--arch", "archs", multiple=True, metavar="SM", help="For --compile-only: such as sm_90a; repeatable.")
def gpucheck(
    device: str,
    report: Path | None,
    only: tuple[str, ...],
    nproc: int,
    budget: float | None,
    sizes: tuple[int, ...] | None,
    quick: bool,
    compile_only: bool,
    on_cpu: bool,
    archs: tuple[str, ...],
) -> None:
    """Check correctness and speed on this machine's GPU.

    Each step runs in its own process within its time limit, the most telling first; each updates the --report. The
    last line is one JSON document: the whole run, or with --report its results only. The exit status is 1 if a step
    failed; a missed speed target is not a failure, nor is a step that found no time left.
    """
    from moe_rt.diagnostics.output import console, make_directory
    from moe_rt.lab.check import run
    from moe_rt.lab.check.report import short, show, write_report

    _refuse_contradictions(compile_only, archs, only, on_cpu)
    try:
        if report is not None:
            make_directory(report)
        gpu = _find_gpu(device, nproc, compile_only, on_cpu)
    except MoeRtError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error

    def save(records: list[dict[str, Any]]) -> None:
        if report is not None:
            write_report(run.document(records, gpu, emulated=on_cpu), report)

    if compile_only:
        records = [_compile_only(archs)]
        save(records)
    else:
        steps = _run(device, quick, nproc, on_cpu, budget, sizes, report, save)
        records = steps.run(only or tuple(STEPS))
    document = run.document(records, gpu, emulated=on_cpu)
    console().print(show(document))
    click.echo(json.dumps(document if report is None else short(document, report), separators=(",", ":")))
    if not document["ok"]:
        raise click.exceptions.Exit(1)


def _refuse_contradictions(compile_only: bool, archs: tuple[str, ...], only: tuple[str, ...], on_cpu: bool) -> None:
    if compile_only != bool(archs):
        raise click.UsageError("--compile-only and --arch need each other")
    if compile_only and only:
        raise click.UsageError("--compile-only is a step by itself; leave out --only")
    if compile_only and on_cpu:
        raise click.UsageError(
            "--compile-only runs nothing, and --emulated compiles for the CPU; leave out one of them"
        )


def _find_gpu(device: str, nproc: int, compile_only: bool, on_cpu: bool) -> dict[str, Any]:
    """Return the properties of the GPU, emulated or not.

    Raises:
        MoeRtError: what the run needs is missing.
    """
    from moe_rt.engine.gpu.libraries import NVSHMEM
    from moe_rt.engine.gpu.nvrtc import find_toolkit
    from moe_rt.lab.check import emulated, run

    if compile_only:
        find_toolkit(NVSHMEM)  # one sentence, not one for each kernel
        return {}
    if on_cpu:
        emulated.tests_directory()
        return emulated.CARD
    return run.gpu_card(device, nproc)


def _run(
    device: str,
    quick: bool,
    nproc: int,
    on_cpu: bool,
    budget: float | None,
    sizes: tuple[int, ...] | None,
    report: Path | None,
    save: Callable[[list[dict[str, Any]]], None],
) -> Run:
    """Return a run in which each step has its own process. Kernels executed on the CPU leave no core idle."""
    from moe_rt.lab.check import child, emulated, run

    patience = emulated.PATIENCE if on_cpu else 1
    return run.Run(
        partial(child.run_in_child, keep=report),
        emulated.DEVICE if on_cpu else device,
        quick or on_cpu,
        sizes,
        max(nproc, emulated.NPROC) if on_cpu else nproc,
        patience * run.BUDGET_S if budget is None else budget,
        patience,
        1 if on_cpu else run.NUM_JOBS,
        emulated.NOT_REHEARSED if on_cpu else {},
        lambda text: click.echo(text, err=True),
        save,
    )


def _compile_only(archs: tuple[str, ...]) -> dict[str, Any]:
    """Compile without reading the cache."""
    import time

    from moe_rt.lab.check import compiling

    check, begin = Check(None, seconds=900.0), time.monotonic()
    check.announce = lambda text: click.echo(text, err=True)
    with check.part("compile-only"):
        compiling.compile_all(archs, (*compiling.VARIANTS, *compiling.over_gin(check)), check, cache=False)
    return check.record("compile-only", "failed" if check.failures else "ok", time.monotonic() - begin)
