"""Fixtures: groups of ranks, one pool of processes per size for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from device.emulated import EmulatedGpu
from harness import ProcessRanks, Ranks, ThreadRanks

CPU_HEAPS = ("threads", "shm")
# "loopback" is the CUDA engine with its kernels on an emulated GPU.
HEAPS = (*CPU_HEAPS, "loopback")


@pytest.fixture(scope="module")
def make_ranks() -> Iterator[Callable[[str, int], Ranks]]:
    """make_ranks(heap, size): ranks to run cases on; a module's cases share its processes.

    No longer than that: the thread of each gloo group that a case left behind wakes 100 times a second.
    """
    pools: dict[int, ProcessRanks] = {}

    def make(heap: str, size: int) -> Ranks:
        if heap == "threads":
            return ThreadRanks(size)
        if heap == "loopback":
            return ThreadRanks(size, EmulatedGpu())
        if size not in pools:
            pools[size] = ProcessRanks(size)
        return pools[size]

    yield make
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
