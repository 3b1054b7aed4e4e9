"""The loopback heap: ranks that are threads share one region of a device, or all raise with the reason."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import pytest
import torch
from heap.fake_nvshmem import HEAP_BYTES, PAGE, HostGpu
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.errors import InvalidConfig, OutOfSharedMemory, PeerTimeout
from moe_rt.memory import loopback, segments

TIMEOUT_S = 100.0


def allocate(group: ThreadGroup, gpus: list[HostGpu], num_bytes: int) -> segments.Segments:
    return loopback.allocate(group, num_bytes, TIMEOUT_S, gpus[group.rank])


def one_gpu(size: int, **kwargs: Any) -> list[HostGpu]:
    return [HostGpu(**kwargs)] * size


def test_memory_is_given_back_once() -> None:
    given_back: list[int] = []
    made = segments.Segments([], [], [], on_release=lambda: given_back.append(1))
    made.release()
    made.release()
    del made
    assert given_back == [1]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_segments_are_slices_of_one_zeroed_region(size: int) -> None:
    gpus = one_gpu(size)
    made = ThreadRanks(size).run(allocate, gpus, 5000)
    addresses = made[0].addresses
    assert all(m.addresses == addresses for m in made)
    assert [a % PAGE for a in addresses] == [0] * size
    assert [a - addresses[0] for a in addresses] == [2 * PAGE * r for r in range(size)]
    assert all(ctypes.string_at(a, 5000) == bytes(5000) for a in addresses)
    assert gpus[0].syncs >= 1, "zeros must be there before any peer may write"
    assert all((m.watches, m.symmetric) == ([None] * size, 0) for m in made)
    assert all(m.streams is made[0].streams == {} for m in made), "one table for all ranks"


def test_region_may_start_off_a_page() -> None:
    class Odd(HostGpu):
        def zeros(self, num_bytes: int) -> torch.Tensor:
            return super().zeros(num_bytes + 512)[512:]

    (made,) = ThreadRanks(1).run(allocate, [Odd()], PAGE)
    region = made.mappings[0]
    assert made.addresses[0] % PAGE == 0
    assert made.addresses[0] + PAGE <= region.data_ptr() + region.numel()


def test_memory_lives_until_the_last_rank_lets_go() -> None:
    made = ThreadRanks(3).run(allocate, one_gpu(3), 100)
    region = weakref.ref(made[0].mappings[0].untyped_storage())
    address = made[2].addresses[0]
    for m in made[:2]:
        m.release()
        assert m.addresses == []
    gc.collect()
    assert region() is not None
    assert ctypes.string_at(address, 100) == bytes(100)
    made[2].release()
    gc.collect()
    assert region() is None
    assert not loopback._in_transit


def test_out_of_memory_is_told_to_every_rank() -> None:
    outcomes = ThreadRanks(3).outcomes(allocate, one_gpu(3), HEAP_BYTES)
    assert [type(o) for o in outcomes] == [OutOfSharedMemory] * 3, outcomes
    assert f"rank 0 could not reserve {3 * HEAP_BYTES + PAGE} bytes" in str(outcomes[2])
    assert isinstance(outcomes[0].__cause__, torch.OutOfMemoryError)


def test_another_error_of_the_device_is_told_to_every_rank() -> None:
    class Broken(HostGpu):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    outcomes = ThreadRanks(2).outcomes(allocate, [Broken()] * 2, 100)
    assert [type(o) for o in outcomes] == [InvalidConfig] * 2, outcomes
    assert "unspecified launch failure" in str(outcomes[1])
    assert not loopback._in_transit


def test_ranks_on_different_devices_are_refused() -> None:
    outcomes = ThreadRanks(2).outcomes(allocate, [HostGpu(), HostGpu(device="meta")], 100)
    assert [type(o) for o in outcomes] == [InvalidConfig] * 2, outcomes
    assert "device: got meta on rank 1, expected cpu as on rank 0" in str(outcomes[0])


def different_sizes(group: ThreadGroup) -> None:
    loopback.allocate(group, 100 + group.rank, TIMEOUT_S, HostGpu())


def test_different_sizes_are_refused() -> None:
    outcomes = ThreadRanks(2).outcomes(different_sizes)
    assert [type(o) for o in outcomes] == [InvalidConfig] * 2, outcomes
    assert "num_bytes: got 101 on rank 1, expected 100 as on rank 0" in str(outcomes[0])


def test_ranks_of_different_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "_in_transit", Elsewhere())
    outcomes = ThreadRanks(2).outcomes(allocate, one_gpu(2), 100)
    assert [type(o) for o in outcomes] == [InvalidConfig] * 2, outcomes
    assert "expected threads of one" in str(outcomes[1])


class Elsewhere(dict[str, Any]):
    """A process-wide table as a rank of another process would see it: empty."""

    def get(self, key: str, default: Any = None) -> Any:
        return default


def test_a_rank_that_stays_away_is_waited_for_in_vain_but_not_for_ever() -> None:
    group = ThreadGroup.make(2)[0]
    with pytest.raises(PeerTimeout):
        loopback.allocate(group, 100, 0.2, HostGpu())
    assert not loopback._in_transit
