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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="also run what is marked as sweep: every combination")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --sweep, combinations whose parts other tests prove are left out."""
    if config.getoption("--sweep"):
        return
    left_out = [item for item in items if item.get_closest_marker("sweep")]
    items[:] = [item for item in items if not item.get_closest_marker("sweep")]
    config.hook.pytest_deselected(items=left_out)


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
