"""Which machine and heap a group runs on, and making the engine for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from moe_rt import _engine
from moe_rt.config import BufferSpec
from moe_rt.errors import InvalidConfig
from moe_rt.faults import Point
from moe_rt.heap import loopback, nvshmem, shm, threads
from moe_rt.heap.rendezvous import Rendezvous, ThreadGroup
from moe_rt.heap.segments import together
from moe_rt.native.cpu import CpuEngine
from moe_rt.native.cuda import CudaEngine, blocks_of_a_wait
from moe_rt.native.engine import Engine
from moe_rt.native.gpu import Gpu
from moe_rt.native.launcher import network_bytes

Heap = Literal["shm", "threads", "loopback", "nvshmem"]


@dataclass(frozen=True)
class Machine:
    """`gpu` is None for CPU ranks; for others a Gpu, or what can stand in for one."""

    heap: Heap
    gpu: Gpu | None


def choose_machine(group: Any, rendezvous: Rendezvous, heap: Heap | Literal["auto"]) -> Machine:
    """What this kind of group runs on.

    Threads share the CPU, or the CUDA device that their group names. Processes have a GPU each where their process
    group has an NCCL backend and torch sees a GPU; otherwise they share the memory of one host.

    Raises:
        InvalidConfig: `heap` does not fit the group, or the device does not exist.
    """
    cpu: Heap
    cuda: Heap
    if isinstance(rendezvous, ThreadGroup):
        cpu, cuda, device = "threads", "loopback", rendezvous.device
        on_cuda = not isinstance(device, str | torch.device) or torch.device(device).type == "cuda"
    else:
        cpu, cuda, device = "shm", "nvshmem", "cuda"
        on_cuda = torch.cuda.is_available() and _has_nccl(group)
    if heap == "auto":
        heap = cuda if on_cuda else cpu
    if heap not in (cpu, cuda):
        raise InvalidConfig(f'heap: got "{heap}", expected "auto", "{cpu}" or "{cuda}" for this kind of group')
    if heap == cpu:
        return Machine(heap, None)
    if on_cuda and not isinstance(device, str | torch.device):
        return Machine(heap, device)
    return Machine(heap, Gpu(device if on_cuda else "cuda"))


def make_engine(
    machine: Machine,
    rendezvous: Rendezvous,
    spec: BufferSpec,
    *,
    timeout_s: float,
    init_timeout_s: float,
    num_threads: int,
    num_sms: int | None,
    fault: _engine.Fault,
) -> Engine:
    """Allocates the segments and makes this rank's engine. Collective: every rank succeeds or every rank raises.

    `fault` is for CPU ranks.
    """
    num_bytes, gpu = spec.shape().segment_bytes(), machine.gpu
    if gpu is None:
        allocate = threads.allocate if machine.heap == "threads" else shm.allocate
        segments = allocate(rendezvous, num_bytes, init_timeout_s)
        made: list[CpuEngine] = []

        def start() -> dict[str, Any]:
            rank, isa = rendezvous.rank, os.environ.get("MOE_RT_ISA", "auto")
            made.append(
                CpuEngine(spec, rank, segments, timeout_s=timeout_s, num_threads=num_threads, isa=isa, fault=fault)
            )
            return {}

        try:
            together(rendezvous, start, "start its engine", init_timeout_s)
        except BaseException:
            for engine in made:
                engine.close()
            segments.release()
            raise
        made[0].reach(Point.POST_RENDEZVOUS)
        return made[0]
    allocate_on = loopback.allocate if machine.heap == "loopback" else nvshmem.allocate
    segments = allocate_on(rendezvous, num_bytes, init_timeout_s, gpu)

    def look() -> dict[str, Any]:
        if spec.overflow == "retry":
            raise InvalidConfig(
                'overflow: got "retry" on CUDA, where the host does not look; expected "raise" or "drop"'
            )
        shared = segments.streams is not None
        blocks = blocks_of_a_wait(spec.num_ranks, gpu, num_sms, shared=shared)
        return {"blocks": blocks, "unmapped": 0 in segments.addresses}

    seen = together(rendezvous, look, "use its GPU", init_timeout_s)
    max_blocks, network = seen[rendezvous.rank]["blocks"], None
    if any(r["unmapped"] for r in seen):
        most = max(r["blocks"] for r in seen)  # symmetric memory has one size on every rank
        network = allocate_on(rendezvous, network_bytes(spec, most), init_timeout_s, gpu)
    engines: list[Engine] = []

    def make() -> dict[str, Any]:
        engine = CudaEngine(
            spec, rendezvous.rank, segments, gpu, network=network, timeout_s=timeout_s, max_blocks=max_blocks
        )
        engines.append(engine)
        return {}

    together(rendezvous, make, "make its engine", init_timeout_s)
    return engines[0]


def _has_nccl(group: Any) -> bool:
    if group is None:
        group = dist.group.WORLD
    elif hasattr(group, "get_group"):  # a one-dimensional mesh
        group = group.get_group()
    try:
        return str(group._get_backend(torch.device("cuda")).name()) == "nccl"
    except RuntimeError:  # no backend for CUDA
        return False
