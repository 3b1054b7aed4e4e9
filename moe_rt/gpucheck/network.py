"""Rounds over NVSHMEM's heap: one process, and where MPS lets two share a GPU, two.

Run as a module this is one of those processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_rt.comm.buffer import Buffer
from moe_rt.gpucheck.steps import Check, Skipped
from moe_rt.heap import nvshmem
from moe_rt.heap.nvshmem_start import mps_is_running
from moe_rt.heap.rendezvous import StoreRendezvous
from moe_rt.testing.ranks import torch_device
from moe_rt.testing.rounds import buffer_kwargs, expect, make_inputs, make_spec, play

PACKAGE = "nvshmem4py-cu13"
ROUNDS, PROCESS_S = 3, 60.0
ONE_HOST = {"NVSHMEM_REMOTE_TRANSPORT": "none", "GLOO_SOCKET_IFNAME": "lo"}
NO_MPS = "skipped: MPS is not running, and NVSHMEM needs it for two PEs on one GPU"


def check(check: Check) -> None:
    if importlib.util.find_spec("nvshmem") is None:
        raise Skipped(f"the package {PACKAGE} is not installed")
    deadline = time.monotonic() + check.seconds
    for size in (1, 2):
        with check.part(f"{size} PEs"):
            if size == 2 and not mps_is_running():
                check.say(NO_MPS)
                continue
            run_processes(str(check.device), size, "nvshmem", min(PROCESS_S, deadline - time.monotonic()))
            check.say(f"{size} PEs: {ROUNDS} rounds equal")


def run_processes(device: str, size: int, heap: str, seconds: float) -> None:
    """Every rank in a process of its own.

    Raises:
        RuntimeError: a process failed or took too long, with what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="moe_rt_gpucheck_") as folder:
        processes, logs = [], []
        for rank in range(size):
            job = {"device": device, "rank": rank, "size": size, "store": f"{folder}/store", "heap": heap}
            logs.append(open(f"{folder}/{rank}.log", "w+"))  # noqa: SIM115  closed below
            command = [sys.executable, "-m", "moe_rt.gpucheck.network", json.dumps({**job, "seconds": seconds})]
            environment = {**ONE_HOST, **os.environ}
            processes.append(subprocess.Popen(command, stdout=logs[-1], stderr=subprocess.STDOUT, env=environment))
        deadline, failed = time.monotonic() + seconds, []
        for rank, process in enumerate(processes):
            try:
                code: Any = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = f"no end within {seconds:.0f} s"
            if code != 0:
                failed.append((rank, code))
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.seek(0)
        texts = [log.read()[-4000:] for log in logs]
        for log in logs:
            log.close()
    if failed:
        rank, code = failed[0]
        raise RuntimeError(f"rank {rank} of {size}: got exit status {code}, expected 0; it wrote\n{texts[rank]}")


def run_rank(device: str, rank: int, size: int, store: str, heap: Any, seconds: float) -> None:
    """One process: joins the group and plays rounds."""
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
    if heap == "nvshmem":
        nvshmem.shutdown(StoreRendezvous(group), seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(**json.loads(sys.argv[1]))
