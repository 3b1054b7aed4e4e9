"""The command `moe-rt gpucheck`. Heavy modules are imported when it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from moe_rt.errors import MoeRtError
from moe_rt.lab.check.steps import STEPS, Check


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
    quick: bool,
    compile_only: bool,
    on_cpu: bool,
    archs: tuple[str, ...],
) -> None:
    """Check correctness and speed on this machine's GPU.

    Each step runs in its own process within its time limit. The last line is one JSON document. The exit status is 1 if
    a step failed; a missed speed target is not a failure.
    """
    from moe_rt.diagnostics.output import console, make_directory
    from moe_rt.lab.check import run
    from moe_rt.lab.check.report import show, write_report

    _refuse_contradictions(compile_only, archs, only, on_cpu)
    try:
        if report is not None:
            make_directory(report)
        gpu = _find_gpu(device, nproc, compile_only, on_cpu)
    except MoeRtError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    names = only or tuple(STEPS)
    records = [_compile_only(archs)] if compile_only else _run_steps(names, device, quick, nproc, on_cpu)
    document = run.document(records, gpu, emulated=on_cpu)
    out = console()
    out.print(show(document))
    if report is not None:
        out.print(f"report: {write_report(document, report)}")
    click.echo(json.dumps(document, separators=(",", ":")))
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


def _run_steps(names: tuple[str, ...], device: str, quick: bool, nproc: int, on_cpu: bool) -> list[dict[str, Any]]:
    """Run each step in its own process, and return the records."""
    from moe_rt.lab.check import child, emulated, run

    return run.run_steps(
        names,
        emulated.DEVICE if on_cpu else device,
        quick or on_cpu,
        child.run_in_child,
        lambda t: click.echo(t, err=True),
        patience=emulated.PATIENCE if on_cpu else 1,
        nproc=max(nproc, emulated.NPROC) if on_cpu else nproc,
        skipped=emulated.NOT_REHEARSED if on_cpu else {},
    )


def _compile_only(archs: tuple[str, ...]) -> dict[str, Any]:
    """Compile without reading the cache."""
    import time

    from moe_rt.lab.check import compiling

    check, begin = Check(None, seconds=900.0), time.monotonic()
    with check.part("compile-only"):
        compiling.compile_all(archs, (*compiling.VARIANTS, *compiling.over_gin(check)), check, cache=False)
    return check.record("compile-only", "failed" if check.failures else "ok", time.monotonic() - begin)
