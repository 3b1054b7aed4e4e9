"""Rounds over NVSHMEM's heap with one process, and with two if MPS lets them share a GPU.

Run as a module, this is one of these processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist

from moe_rt.buffer.buffer import Buffer
from moe_rt.extras import cuda_extra, how_to_install
from moe_rt.group.rendezvous import StoreRendezvous
from moe_rt.group.thread_ranks import torch_device
from moe_rt.lab.check.steps import Check, Skipped
from moe_rt.lab.testing.programs import ONE_HOST, Program, end_with_starter, running, wait
from moe_rt.lab.testing.rounds import buffer_kwargs, expect, make_inputs, make_spec, play
from moe_rt.memory import nvshmem
from moe_rt.memory.heaps import HEAPS
from moe_rt.memory.nvshmem_start import mps_is_running

ROUNDS, PROCESS_S = 3, 60.0
NO_NETWORK = {**ONE_HOST, "NVSHMEM_REMOTE_TRANSPORT": "none"}
NO_MPS = "skipped: MPS is not running, and NVSHMEM needs it for two PEs on one GPU"


def check(check: Check) -> None:
    if importlib.util.find_spec("nvshmem") is None:
        raise Skipped(f"NVSHMEM's package is not installed; {how_to_install(cuda_extra())}")
    deadline = time.monotonic() + check.seconds
    for size in (1, 2):
        with check.part(f"{size} PEs"):
            if size == 2 and not mps_is_running():
                check.say(NO_MPS)
                continue
            run_processes(str(check.device), size, "nvshmem", min(PROCESS_S, deadline - time.monotonic()))
            check.say(f"{size} PEs: {ROUNDS} rounds equal")


def run_processes(device: str, size: int, heap: str, seconds: float) -> None:
    """Run every rank in its own process.

    Raises:
        RuntimeError: a process failed or took too long; the message holds its output.
    """
    run_programs("moe_rt.lab.check.network", {"device": device, "heap": heap, "seconds": seconds}, size, seconds, {})


def run_programs(
    module: str, job: Mapping[str, Any], size: int, seconds: float, statuses: Mapping[int, int]
) -> list[str]:
    """Run a module as `size` processes. Each receives the job, its rank, the size and the path of a store.

    Args:
        statuses: expected exit statuses of ranks that shall not end with 0.

    Returns:
        The output of each process.

    Raises:
        RuntimeError: a process failed or took too long; the message holds its output.
    """
    with tempfile.TemporaryDirectory(prefix="moe_rt_gpucheck_") as folder, ExitStack() as stack:
        logs = [stack.enter_context(open(f"{folder}/{rank}.log", "w+")) for rank in range(size)]
        shared = {**job, "size": size, "store": f"{folder}/store"}
        command = [sys.executable, "-m", module]
        programs = [
            Program(
                [*command, json.dumps({**shared, "rank": rank})], {**NO_NETWORK, **os.environ}, log, subprocess.STDOUT
            )
            for rank, log in enumerate(logs)
        ]
        failed: list[tuple[int, Any]] = []
        deadline = time.monotonic() + seconds
        with running(programs) as processes:
            for rank, process in enumerate(processes):
                code: Any = wait(process, max(0.0, deadline - time.monotonic()))
                if code != statuses.get(rank, 0):
                    failed.append((rank, f"no end within {seconds:.0f} s" if code is None else code))
        texts = [_last_words(log) for log in logs]
    if failed:
        rank, code = failed[0]
        expected = statuses.get(rank, 0)
        raise RuntimeError(
            f"rank {rank} of {size}: got exit status {code}, expected {expected}; it wrote\n{texts[rank]}"
        )
    return texts


def _last_words(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-4000:]


def run_rank(device: str, rank: int, size: int, store: str, heap: Any, seconds: float) -> None:
    """Run one rank: join the group and play rounds."""
    if torch_device(device).type == "cuda":
        torch.cuda.set_device(device)
    where = torch_device(device)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    spec = make_spec(size)
    group = dist.group.WORLD
    assert group is not None
    with Buffer(group, heap=heap, timeout_s=20.0, init_timeout_s=seconds, **buffer_kwargs(spec)) as buffer:
        for turn in range(ROUNDS):
            inputs = make_inputs(spec, [12, 7][:size], 40 + turn)
            play(buffer, inputs, expect(spec, inputs, turn), where, tag=turn)
        buffer.check()
        dist.barrier()
    if HEAPS[heap].module is nvshmem:
        nvshmem.shutdown(StoreRendezvous(group), seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    end_with_starter()
    run_rank(**json.loads(sys.argv[1]))
