"""The table of heaps names every heap once, and says which ranks each is for."""

from __future__ import annotations

from typing import get_args

import pytest

from moe_rt.config.options import HeapKind
from moe_rt.memory.heaps import HEAPS, heaps_for


def test_every_heap_has_a_row() -> None:
    assert set(HEAPS) == set(get_args(HeapKind))
    assert all(callable(heap.module.allocate) for heap in HEAPS.values())


def test_heaps_over_a_network_of_gpus_can_ask_what_is_mapped() -> None:
    assert [name for name, heap in HEAPS.items() if hasattr(heap.module, "mapped")] == ["nvshmem", "gin"]
    assert [name for name, heap in HEAPS.items() if heap.network] == ["ucx", "nvshmem", "gin"]


def test_heaps_over_hosts_can_look_for_their_library() -> None:
    assert [name for name, heap in HEAPS.items() if heap.over_hosts] == ["ucx"]
    assert all(callable(heap.module.library) for heap in HEAPS.values() if heap.over_hosts)


@pytest.mark.parametrize(
    ("processes", "gpu", "names"),
    [
        (True, False, ["shm", "ucx"]),
        (False, False, ["threads"]),
        (False, True, ["loopback"]),
        (True, True, ["nvshmem", "gin"]),
    ],
)
def test_heaps_of_a_kind_of_rank(processes: bool, gpu: bool, names: list[str]) -> None:
    """The first is what heap="auto" takes."""
    assert heaps_for(processes=processes, gpu=gpu) == names
