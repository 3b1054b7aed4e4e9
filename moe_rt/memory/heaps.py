"""Table of the heaps: the module of each, and all that other code decides by. A heap is one module and one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_rt.config.options import HeapKind
from moe_rt.memory import gin, loopback, nvshmem, shm, threads, ucx


@dataclass(frozen=True, kw_only=True)
class HeapTraits:
    """Traits of a heap.

    Attributes:
        module: has `allocate`; with GPUs and a network also `mapped`; with CPU ranks and a network `library`, which
            raises if it is not installed.
        gpu: ranks are on GPUs: one each if they are processes, one for all if they are threads.
        processes: ranks are processes; otherwise they are threads of one.
        network: a network reaches peers whose memory is not mapped. CPU heaps with one allocate by a Shape instead of a
            number of bytes.
    """

    module: Any
    gpu: bool
    processes: bool
    network: bool = False

    @property
    def over_hosts(self) -> bool:
        """True if CPU ranks may be on several hosts."""
        return self.network and not self.gpu


HEAPS: dict[HeapKind, HeapTraits] = {
    "shm": HeapTraits(module=shm, gpu=False, processes=True),
    "ucx": HeapTraits(module=ucx, gpu=False, processes=True, network=True),
    "threads": HeapTraits(module=threads, gpu=False, processes=False),
    "loopback": HeapTraits(module=loopback, gpu=True, processes=False),
    "nvshmem": HeapTraits(module=nvshmem, gpu=True, processes=True, network=True),
    "gin": HeapTraits(module=gin, gpu=True, processes=True, network=True),
}


def heaps_for(*, processes: bool, gpu: bool) -> list[HeapKind]:
    """Return the heaps for such ranks, in the order of the table: heap="auto" prefers the first."""
    return [name for name, heap in HEAPS.items() if heap.processes is processes and heap.gpu is gpu]
