"""The ranks of a run as contestants see them: identity, processor, rendezvous, and a barrier of a microsecond."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rt.engine.cpu import cache_bytes
from moe_rt.errors import PeerTimeout
from moe_rt.group.groups import Group
from moe_rt.group.rendezvous import Rendezvous, StoreRendezvous, ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, torch_device
from moe_rt.lab.testing.streams import StreamGate


class Processor:
    """A core, or a GPU.

    Args:
        device: a torch device or its name, or an object that emulates a GPU.

    Attributes:
        device: device of this rank's tensors.
        name: its name in results.
        cache_bytes: size of its last-level cache.
    """

    def __init__(self, device: Any) -> None:
        self.device = torch_device(device)
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self.name, self.cache_bytes = properties.name, properties.L2_cache_size
        else:
            self.name, self.cache_bytes = getattr(device, "name", "cpu"), cache_bytes()
        self._filler: Tensor | None = None

    def finish(self) -> None:
        """Wait for the work that this thread has queued; a CPU rank has completed it already."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def cool(self) -> None:
        """Read and write twice the size of the last-level cache, so that it holds nothing else.

        It also reads, since writes may bypass the caches.
        """
        if self._filler is None:
            self._filler = torch.zeros(2 * self.cache_bytes // 8, dtype=torch.int64, device=self.device)
        self._filler.add_(1)


TIMEOUT_S = 600.0
LINE = 8  # 64-bit words of a cache line, so that a rank polls lines that only their owner writes


class SpinBarrier:
    """Barrier of arrival counters in shared memory. A collective's own barrier would cost more than a small op."""

    def __init__(self, shared: mmap.mmap, rank: int, size: int, pause: Callable[[], object]) -> None:
        self._words = memoryview(shared).cast("q")
        self._mine, self._peers = rank * LINE, [peer * LINE for peer in range(size) if peer != rank]
        self._pause, self._arrivals = pause, 0

    def wait(self) -> None:
        self._arrivals += 1
        self._words[self._mine] = self._arrivals
        deadline = time.monotonic() + TIMEOUT_S
        for peer in self._peers:
            while self._words[peer] < self._arrivals:
                self._pause()
                if time.monotonic() > deadline:
                    raise PeerTimeout(f"rank {peer // LINE} did not reach the barrier within {TIMEOUT_S:g} s")


@dataclass(frozen=True)
class World:
    """One rank. Ranks are all processes, or all threads of one process.

    Attributes:
        rank, size: this rank, and the number of ranks.
        group: the group to make a moe_rt.Buffer for.
        board: all-gathers texts.
        barrier: starts every isolated iteration.
        processor: the rank's core or GPU.
        mpi: True if mpirun started the ranks.
        gate: lets the streams of virtual ranks begin together; None for other ranks.
    """

    rank: int
    size: int
    group: Group
    board: Rendezvous
    barrier: SpinBarrier
    processor: Processor
    mpi: bool
    gate: StreamGate | None = None

    def meet(self, cold: bool = False) -> None:
        """Wait until every rank is here and idle; if `cold`, with its caches full of other data."""
        if cold:
            self.processor.cool()
        self.processor.finish()
        self.barrier.wait()

    def start(self) -> Any:
        """Begin an iteration; return what `stop` takes.

        Virtual ranks are timed by events of their streams, which are held until all hosts have queued the iteration:
        one after another, under Python's lock, that takes longer than an op of few tokens.
        """
        return perf_counter_ns() if self.gate is None else (self.gate.wait(), _event_now())

    def stop(self, begun: Any) -> tuple[int, int]:
        """Wait for the iteration, and return its begin and end in nanoseconds of one clock of all ranks."""
        if self.gate is None:
            self.processor.finish()
            return begun, perf_counter_ns()
        (origin, begin), end = begun, _event_now()
        self.processor.finish()
        return round(1e6 * origin.elapsed_time(begin)), round(1e6 * origin.elapsed_time(end))

    def gather(self, text: str) -> list[str]:
        """All-gather a text, in rank order. Collective."""
        return self.board.all_gather(text, TIMEOUT_S)


def _event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def pin(cores: list[int]) -> None:
    """Bind the calling thread, and all threads that it will start, to these cores."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)


def barrier_bytes(size: int) -> int:
    return size * LINE * 8


def join_processes(directory: Path, size: int, cores: list[int], on_gpu: bool) -> World:
    """Join the other processes through files in `directory`, and create the default process group.

    A CPU rank has one core. A GPU rank uses the GPU of its rank number. It also has threads that feed NCCL and
    autograd, so it shares the cores evenly with the others.
    """
    mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    rank = int(os.environ["OMPI_COMM_WORLD_RANK" if mpi else "RANK"])
    own = [cores[rank % len(cores)]]
    pin(cores[rank::size] or own if on_gpu else own)  # first, so that threads of libraries inherit it
    with open(directory / "barrier", "r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    processor = Processor(torch.device("cuda", rank) if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(processor.device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    store, timeout = f"file://{directory}/store", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    # Ranks that share a core must yield it for the others to arrive.
    barrier = SpinBarrier(shared, rank, size, os.sched_yield)
    return World(rank, size, group, StoreRendezvous(group), barrier, processor, mpi=mpi)


def run_threads(
    size: int, cores: list[int], work: Callable[[World], None], device: Any = "cpu", reserve_bytes: int = 0
) -> None:
    """Run `work` on `size` ranks that are threads, and raise the first exception of any of them.

    Args:
        device, reserve_bytes: the ranks' device and its reserved memory, as for `group.thread_ranks.ThreadRanks`.
    """
    shared = mmap.mmap(-1, barrier_bytes(size))
    gate = StreamGate(size, TIMEOUT_S) if torch_device(device).type == "cuda" else None

    def rank_main(group: ThreadGroup) -> None:
        pin([cores[group.rank % len(cores)]])
        # sleep(0) releases the interpreter lock; no other rank can arrive without it.
        barrier = SpinBarrier(shared, group.rank, size, lambda: time.sleep(0))
        work(World(group.rank, size, group, group, barrier, Processor(device), mpi=False, gate=gate))

    ThreadRanks(size, device, reserve_bytes=reserve_bytes).run(rank_main, seconds=threading.TIMEOUT_MAX)
