"""The NVSHMEM heap on a stand-in: every rank gets every segment, or every rank raises with the reason."""

from __future__ import annotations

import ctypes

import pytest
from heap.fake_nvshmem import HEAP_BYTES, PAGE, HostGpu
from heap.nvshmem_job import TIMEOUT_S, Job, release
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.errors import InvalidConfig, OutOfSharedMemory, PeerTimeout
from moe_rt.memory import nvshmem


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_reaches_every_segment(size: int) -> None:
    job = Job(size)
    made = job.allocate(5000)
    for rank, segments in enumerate(made):
        assert segments.symmetric == segments.addresses[rank]
        assert segments.addresses == made[0].addresses, "threads have one address space"
        assert segments.watches == [None] * size
    assert len(set(made[0].addresses)) == size
    for address in made[0].addresses:
        assert address % PAGE == 0
        assert ctypes.string_at(address, 5000) == bytes(5000)
    offsets = {s.symmetric - job.cores[r].base for r, s in enumerate(made)}
    assert len(offsets) == 1, "puts name remote memory by the own address"


def test_a_segment_has_a_page_more_than_it_is_asked_for() -> None:
    """NVSHMEM aligns to less than a page, so a segment begins at the first page of its memory."""
    job = Job(2)
    for num_bytes in (1, PAGE, PAGE + 1):
        job.allocate(num_bytes)
    assert [size for process, size in job.cluster.of("buffer") if process == 0] == [2 * PAGE, 2 * PAGE, 3 * PAGE]


def test_ranks_are_pes_and_the_second_buffer_initialises_nothing() -> None:
    job = Job(3)
    made = job.allocate(100, [2, 0, 1])
    assert sorted(job.cluster.of("init")) == [(0, (1, 3)), (1, (2, 3)), (2, (0, 3))]
    assert [process for process, _ in job.cluster.of("get_unique_id")] == [2]
    more = job.allocate(100, [2, 0, 1])
    assert len(job.cluster.of("init")) == 3
    assert not {s.symmetric for s in made} & {s.symmetric for s in more}


def test_another_group_is_refused_by_all_its_ranks_with_both_named() -> None:
    job = Job(3)
    made = job.allocate(100, [0, 1])
    calls = len(job.cluster.calls)
    text = job.refuse(InvalidConfig, ranks=[1, 2])
    names = [world._name for world in job.worlds]
    assert f"got {names[1:]}, expected {names[:2]}" in text
    assert [call for call in job.cluster.calls[calls:] if call[1] != "load"] == []
    assert f"got {names[1::-1]}" in job.refuse(InvalidConfig, ranks=[1, 0]), "another order is another numbering"
    others = job.outcomes(100, [2, 1])
    assert [(error.rank, error.peer) for error in others] == [(0, 1), (1, 1)], "the rank that is in another world"
    job.allocate(100, [0, 1])
    assert made[0].addresses, "the first group goes on"


def test_a_world_that_is_there_is_used_and_left_alone() -> None:
    job = Job(2)
    job.cluster.initialise([0, 1])
    release(job.allocate(100))
    assert not job.cluster.of("init")
    assert job.shutdown() == [True, True]
    assert len(job.cluster.of("free")) == 2
    assert not job.cluster.of("finalize")
    job.allocate(100)


def test_a_world_with_other_numbers_is_refused() -> None:
    job = Job(2)
    job.cluster.initialise([1, 0])
    assert "got PE 0 of 2, expected PE 1 of 2" in job.refuse(InvalidConfig)
    job = Job(3)
    job.cluster.initialise([0, 1, 2])
    assert "got PE 1 of 3, expected PE 1 of 2" in job.refuse(InvalidConfig, ranks=[0, 1])


def test_a_world_on_some_ranks_only_is_refused() -> None:
    job = Job(2)
    job.cluster.initialise([0])
    assert "got PE 0 of 1, expected PE 0 of 2" in job.refuse(InvalidConfig)
    job.cores[0].fabric.size = 2
    assert "got it initialised on ranks [0] of 2" in job.refuse(InvalidConfig)


def test_numbers_that_init_gives_are_compared() -> None:
    """Remains of an earlier world may override the numbers that NVSHMEM is given."""
    job = Job(2)
    job.cores[1].my_pe = lambda: 0  # type: ignore[method-assign]
    assert "got PE 0 of 2, expected PE 1 of 2" in job.refuse(InvalidConfig)


def test_a_world_made_outside_of_python_is_refused() -> None:
    job = Job(2)
    job.cluster.initialise([0, 1])
    tracking = job.cores[1]._internal_tracking
    tracking._is_initialized["status"] = tracking.InternalInitStatus.UNINITIALIZED
    assert "initialised by other means" in job.refuse(InvalidConfig)
    assert not job.cluster.of("buffer")


def test_a_world_that_others_make_after_a_shutdown_is_left_alone() -> None:
    job = Job(2)
    release(job.allocate(100))
    assert job.shutdown() == [True, True]
    job.cluster.initialise([0, 1])
    release(job.allocate(100))
    assert job.shutdown() == [True, True]
    assert len(job.cluster.of("finalize")) == 2, "only the first world"


def test_a_world_finalized_by_others_is_noticed() -> None:
    job = Job(1)
    job.allocate(100)
    job.cores[0].finalize()
    assert "finalized by other means" in job.refuse(InvalidConfig)


@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize("call", ["load", "init", "buffer", "quiet", "fill"])
def test_what_fails_on_one_rank_is_raised_by_all(call: str, faulty_rank: int) -> None:
    job = Job(3)
    if call == "quiet":
        release(job.allocate(100))
    job.cores[faulty_rank].fail.add(call)
    kind = OutOfSharedMemory if call == "buffer" else InvalidConfig
    text = job.refuse(kind)
    assert ("CUDA_ERROR_ILLEGAL_ADDRESS" if call == "fill" else f"{call} fails in process {faulty_rank}") in text
    assert f"rank {faulty_rank} could not" in text


def test_no_unique_id_is_raised_by_all() -> None:
    job = Job(2)
    job.cores[0].fail.add("get_unique_id")
    assert "rank 0 could not make the unique id" in job.refuse(InvalidConfig)
    job.cores[0].fail.clear()
    job.allocate(100)


def test_a_heap_that_is_full_is_out_of_memory() -> None:
    job = Job(2)
    made = job.allocate(HEAP_BYTES // 2)
    assert f"segment of {HEAP_BYTES // 2} bytes" in job.refuse(OutOfSharedMemory, HEAP_BYTES // 2)
    assert job.allocate(PAGE)
    assert made[0].addresses


def test_a_gpu_that_is_full_is_noticed_before_anyone_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    job.gpus[1] = HostGpu(device="meta")
    free = {"cpu": nvshmem.HEAP_STEP, "meta": nvshmem.HEAP_STEP - 1}
    monkeypatch.setattr(nvshmem, "free_bytes", lambda device: free[device.type])
    text = job.refuse(OutOfSharedMemory)
    assert f"rank 1: got {free['meta']} bytes free on meta, expected 536870912 for a segment of 100: " in text
    assert "NVSHMEM grows in steps of 536870912" in text
    assert not job.cluster.of("buffer")
    free["meta"] += 1
    job.allocate(nvshmem.HEAP_STEP // 1024)


def test_peers_that_are_not_mapped_have_no_address() -> None:
    job = Job(3)
    job.cores[0].unmapped, job.cores[2].unmapped = {2}, {0, 1}
    made = job.allocate(100)
    own = [s.symmetric for s in made]
    assert [s.addresses for s in made] == [[own[0], own[1], 0], own, [0, 0, own[2]]]


def test_heaps_at_different_places_in_a_page_are_refused() -> None:
    job = Job(2)
    job.cores[1].shift = 512
    assert "bytes into a page by rank" in job.refuse(InvalidConfig)
    for num_bytes in (1, 100):
        text = job.refuse(InvalidConfig, num_bytes)
        assert "got segments at [3584, 3072] bytes into a page by rank" in text, "what they got is not handed out later"


def test_sizes_and_devices_must_agree() -> None:
    job = Job(2)
    job.allocate(100)
    job.gpus[1] = HostGpu(device="meta")
    assert "gpu: got meta, expected cpu" in job.refuse(InvalidConfig)
    outcomes = ThreadRanks(2).outcomes(different_sizes, Job(2))
    assert all(isinstance(o, InvalidConfig) and "got [100, 101] by rank" in str(o) for o in outcomes)


def different_sizes(group: ThreadGroup, job: Job) -> None:
    job.worlds[group.rank].allocate(group, 100 + group.rank, TIMEOUT_S, job.gpus[group.rank])


def test_a_rank_that_stays_away_ends_the_waiting() -> None:
    job = Job(2)
    with pytest.raises(PeerTimeout):
        job.worlds[0].allocate(ThreadGroup.make(2)[0], 100, 0.2, job.gpus[0])
