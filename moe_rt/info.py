"""The command `moe-rt info`, and the machine card, without which figures mean nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch

from moe_rt import _engine
from moe_rt.diagnostics.attach import attach
from moe_rt.diagnostics.output import console
from moe_rt.diagnostics.show import show_report
from moe_rt.engine.cpu import cache_bytes
from moe_rt.errors import MoeRtError
from moe_rt.memory import ucx


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


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def machine_card() -> dict[str, Any]:
    """Processor, memory, versions, commit and date."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(cores()),
        "cache_mib": cache_bytes() >> 20,
        "memory": _field("/proc/meminfo", "MemTotal"),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moe_rt": version("moe_rt"),
        "isa": isa(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def isa() -> str:
    """Instruction set of new buffers' row primitives: MOE_RT_ISA, or the best of this machine."""
    chosen = os.environ.get("MOE_RT_ISA", "auto")
    return _engine.isas()[-1] if chosen == "auto" else chosen


def commit() -> str:
    """Commit of the tree that contains this package, with a + if tracked files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    with suppress(OSError, subprocess.CalledProcessError):
        head = _output([*git, "rev-parse", "--short", "HEAD"])
        return head + ("+" if _output([*git, "status", "--porcelain", "--untracked-files=no"]) else "")
    return "unknown"


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return "unknown"


def _field(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"
