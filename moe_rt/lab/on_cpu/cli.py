"""The command `moe-rt on-cpu`: runs a program, or ranks of it, where CUDA devices are the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click

from moe_rt.lab.on_cpu.hooks import DEFAULT_DEVICES, environment, which_deep_ep
from moe_rt.lab.testing.ports import free_ports

_POLL_S, _GRACE_S = 0.05, 10.0


@click.command("on-cpu", context_settings={"ignore_unknown_options": True})
@click.option("--ranks", type=click.IntRange(1), help="Start this number of ranks, with torchrun's variables.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def on_cpu(ranks: int | None, command: tuple[str, ...]) -> None:
    """Run COMMAND, written for CUDA, on CPU ranks: moe-rt on-cpu -- torchrun --nproc-per-node 2 test.py

    CUDA devices become the CPU and nccl groups become gloo's, here and in all Python processes that COMMAND starts.
    `import deep_ep` finds moe_rt.compat.deep_ep unless another is installed. Triton kernels and CUDA graphs are
    refused by name. docs/howto/deepep.md has the rest.
    """
    if command[0].startswith("-"):
        raise click.NoSuchOption(command[0], possibilities=["--ranks"])
    command = (_program(command[0]), *command[1:])
    variables = environment(DEFAULT_DEVICES if ranks is None else max(ranks, DEFAULT_DEVICES))
    click.echo(f"moe-rt on-cpu: cuda is the CPU, nccl is gloo, deep_ep is {which_deep_ep()}", err=True)
    if ranks is None:
        os.execve(command[0], command, {**os.environ, **variables})
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()), "WORLD_SIZE": str(ranks)}
    variables |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    started = []
    try:
        for rank in range(ranks):
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            started.append(subprocess.Popen(command, env={**os.environ, **own}))
        status = _first_failure(started)
    finally:
        _end(started)
    sys.exit(status)


def _program(name: str) -> str:
    """Return the path of a program. An environment's torchrun is found although the environment is not active."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise click.ClickException(f"COMMAND: got {name}, expected a program that can be run, as in: python {name}")
    return found


def _first_failure(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Return the status of the first rank that fails, 0 if all succeed."""
    statuses: list[int | None] = [None]
    while None in statuses and not any(statuses):
        time.sleep(_POLL_S)
        statuses = [rank.poll() for rank in ranks]
    for number, status in enumerate(statuses):
        if status:
            click.echo(f"moe-rt on-cpu: rank {number} ended with status {status}", err=True)
            return status if status > 0 else 128 - status
    return 0


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run. Those of a failed group have time to raise their own errors."""
    deadline = time.monotonic() + _GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        try:
            rank.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
