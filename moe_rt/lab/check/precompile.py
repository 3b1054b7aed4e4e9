"""The command `moe-rt compile`: fill a kernel cache for a GPU that is elsewhere. Needs no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import click

from moe_rt.errors import MoeRtError

_DTYPES = {"bf16": "Bf16", "fp32": "F32", "fp16": "F16", "fp64": "F64"}
_SECONDS = 1800.0


@click.command()
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), required=True, help="Directory to fill.")
@click.option("--arch", "archs", multiple=True, required=True, metavar="SM", help="Such as sm_90a; repeatable.")
@click.option("--hidden", type=click.IntRange(min=1), help="Elements of a row. Default: all that gpucheck runs.")
@click.option("--topk", type=click.IntRange(min=1), help="Experts of a token; goes with --hidden.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bf16", show_default=True, help="Of rows.")
@click.option("--rows-as", type=click.Choice(["fp8", "int8"]), help="Codes that rows travel as, both ways.")
def compile(
    into: Path, archs: tuple[str, ...], hidden: int | None, topk: int | None, dtype: str, rows_as: str | None
) -> None:
    """Compile kernels into a directory, for a machine with a GPU that runs the same moe_rt and NVRTC.

    Copy the directory there, keep it private to its user, and set MOE_RT_CACHE to it: no kernel is then compiled.
    """
    from moe_rt.diagnostics.output import make_directory
    from moe_rt.engine.gpu.libraries import NVSHMEM
    from moe_rt.engine.gpu.nvrtc import find_toolkit
    from moe_rt.lab.check import compiling
    from moe_rt.lab.check.steps import Check

    if (hidden is None) != (topk is None):
        raise click.UsageError("--hidden and --topk need each other")
    try:
        make_directory(into)
        find_toolkit(NVSHMEM)
    except MoeRtError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    into.chmod(0o700)  # code of a directory that others can write to is not run
    os.environ["MOE_RT_CACHE"] = str(into.resolve())
    check = Check(None, seconds=_SECONDS, announce=lambda text: click.echo(text, err=True))
    variants: tuple[compiling.Variant, ...] = (*compiling.VARIANTS, *compiling.NEEDED)
    if hidden is not None and topk is not None:
        variants = compiling.variants_for(_DTYPES[dtype], hidden, topk, rows_as)
    compiling.compile_all(archs, variants, check, cache=True)
    for failure in check.failures:
        click.echo(failure, err=True)
    click.echo(
        f"{len(list(into.glob('*.cubin')))} compiled sources in {into}; on the other machine: MOE_RT_CACHE={into}"
    )
    if check.failures:
        raise click.exceptions.Exit(1)
