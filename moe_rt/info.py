"""The command `moe-rt info`."""

from __future__ import annotations

import click
import torch

from moe_rt import _engine
from moe_rt.diagnostics.attach import attach
from moe_rt.diagnostics.show import show_report
from moe_rt.errors import MoeRtError
from moe_rt.heap import ucx
from moe_rt.testing.host_info import machine_card
from moe_rt.testing.output import console


@click.command()
@click.option("--attach", "pid", type=int, metavar="PID", help="Report on the group of this process instead.")
@click.option("--json", "as_json", is_flag=True, help="With --attach: one JSON document, a list of reports.")
def info(pid: int | None, as_json: bool) -> None:
    """Show what this machine offers: version, instruction sets, cores, heaps.

    With --attach: show what each rank of a running group does and which rank it waits for, also if ranks hang.
    """
    if pid is not None:
        return _info_on_group(pid, as_json)
    if as_json:
        raise click.UsageError("--json needs --attach PID")
    card = machine_card()
    card["isas"] = ", ".join(_engine.isas())
    card["GPUs"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none"
    card["heaps"] = (
        "shm (processes), ucx (processes on several hosts), threads (threads), "
        "nvshmem and gin (processes, a GPU each), loopback (threads, one GPU)"
    )
    card['heap="auto"'] = (
        "nvshmem for a process group with NCCL where torch sees a GPU, otherwise shm, or ucx on several hosts; "
        "loopback for a ThreadGroup on a GPU, otherwise threads"
    )
    card["UCX"] = ucx.describe()
    for name, value in card.items():
        click.echo(f"{name:12} {value}")


def _info_on_group(pid: int, as_json: bool) -> None:
    try:
        reports = attach(pid)
    except MoeRtError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    if as_json:
        click.echo(f"[{','.join(report.to_json() for report in reports)}]")
    else:
        for report in reports:
            console().print(show_report(report))
