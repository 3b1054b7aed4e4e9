"""Released segments of the NVSHMEM heap: freeing is collective, releasing is not."""

from __future__ import annotations

import ctypes
import gc

import pytest
from heap.fake_nvshmem import PAGE
from heap.nvshmem_job import TIMEOUT_S, Job, release
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.errors import InvalidConfig, OutOfSharedMemory


def test_released_segments_are_kept_and_reused_zeroed() -> None:
    job = Job(2)
    large, small = job.allocate(3 * PAGE), job.allocate(PAGE)
    addresses = [small[0].addresses, large[0].addresses]
    for address in [*addresses[0], *addresses[1]]:
        ctypes.memset(address, 0x5A, PAGE)
    release(large)
    release(small)
    assert [(s.addresses, s.symmetric) for s in small] == [([], 0)] * 2
    syncs, calls = job.gpus[1].syncs, len(job.cluster.calls)
    first, second = job.allocate(PAGE - 1), job.allocate(PAGE - 1)
    assert [first[0].addresses, second[1].addresses] == addresses, "the smallest that fits comes first"
    assert {ctypes.string_at(a, PAGE) for a in [*addresses[0], *addresses[1]]} == {bytes(PAGE)}
    assert job.gpus[1].syncs >= syncs + 6, "work and puts of before are over, then the zeros are there"
    assert {name for _, name, _ in job.cluster.calls[calls:]} == {"quiet"}, "nothing collective"
    third = job.allocate(PAGE)
    assert not set(third[0].addresses) & {*addresses[0], *addresses[1]}


def test_a_segment_is_reused_only_when_every_rank_let_go() -> None:
    job = Job(3)
    first = job.allocate(PAGE)
    addresses = first[0].addresses
    release(first[:2])
    second = job.allocate(PAGE)
    assert not set(second[0].addresses) & set(addresses)
    first.pop().release()
    assert job.allocate(PAGE)[2].addresses == addresses


def test_garbage_is_let_go_of_without_a_call() -> None:
    job = Job(2)
    made = job.allocate(PAGE)
    addresses, calls = list(made[0].addresses), len(job.cluster.calls)
    del made
    gc.collect()
    assert len(job.cluster.calls) == calls
    assert job.allocate(PAGE)[0].addresses == addresses
    worlds = len(job.cluster.calls)
    job.worlds.clear()
    gc.collect()
    assert len(job.cluster.calls) == worlds, "a process that ends calls nothing collective"


def test_memory_that_only_some_ranks_got_is_never_used_or_freed() -> None:
    job = Job(2)
    release(job.allocate(PAGE))
    job.cores[1].fail.add("buffer")
    job.refuse(OutOfSharedMemory, 4 * PAGE)
    job.cores[1].fail.clear()
    assert "failed on some ranks only" in job.refuse(InvalidConfig, 4 * PAGE), "the heaps no longer are symmetric"
    release(job.allocate(PAGE))
    assert job.shutdown() == [False, False]
    assert len(job.cores[0].freed) == 1
    assert not job.cluster.of("finalize"), "it would free what was left"


def test_shutdown_frees_in_order_finalizes_and_lets_start_anew() -> None:
    job = Job(2)
    made = [job.allocate(size * PAGE) for size in (2, 1, 3)]
    offsets = [s[0].symmetric - job.cores[0].base for s in made]
    assert all("got [3, 3] segments in use" in str(o) for o in job.shutdown())
    for segments in reversed(made):
        release(segments)
    for module in (7, 8, 9):
        job.worlds[0].register_module(module)
    assert job.shutdown() == [True, True]
    assert job.cluster.of("module_finalize") == [(0, 7), (0, 8), (0, 9)]
    assert [o // PAGE for o in job.cores[0].freed] == [o // PAGE - 1 for o in offsets]
    assert job.cores[0].freed == job.cores[1].freed == sorted(job.cores[0].freed)
    own = [name for process, name, _ in job.cluster.calls if process == 0]
    assert own[-7:] == [*["module_finalize"] * 3, *["free"] * 3, "finalize"]
    assert job.shutdown() == [True, True], "nothing is left to do"
    job.worlds[0].unregister_module(7)
    job.allocate(PAGE, [1, 0])
    assert len(job.cluster.of("init")) == 4


def test_only_the_group_that_is_the_world_shuts_it_down() -> None:
    job = Job(3)
    made = job.allocate(PAGE)

    def shut_down(group: ThreadGroup) -> bool:
        return job.worlds[group.rank].shutdown(group, TIMEOUT_S)

    names = [world._name for world in job.worlds]
    for _ in range(2):  # whether its segments are in use or not
        outcomes = ThreadRanks(2).outcomes(shut_down)
        assert all(isinstance(o, InvalidConfig) for o in outcomes), outcomes
        assert all(f"group: got {names[:2]}, expected {names} as in the process of rank 0" in str(o) for o in outcomes)
        release(made)
    assert not job.cluster.of("free")


def test_a_segment_that_could_not_be_zeroed_is_handed_out_later() -> None:
    job = Job(2)
    release(job.allocate(PAGE))
    (buffer,) = job.cores[1].buffers
    buffer.fails = True
    job.refuse(InvalidConfig, PAGE)
    buffer.fails = False
    job.allocate(PAGE)
    assert len(job.cores[0].buffers) == 1
    job = Job(2)
    job.cores[1].fail.add("fill")
    job.refuse(InvalidConfig, PAGE)
    (buffer,) = job.cores[1].buffers
    buffer.fails = False
    job.allocate(PAGE)
    assert len(job.cores[0].buffers) == 1, "also one that no buffer has had"


def test_shutdown_of_one_rank_still_in_use_is_refused_by_all() -> None:
    job = Job(2)
    made = job.allocate(PAGE)
    made[0].release()
    outcomes = job.shutdown()
    assert all(isinstance(o, InvalidConfig) and "got [0, 1] segments in use" in str(o) for o in outcomes), outcomes
    assert not job.cluster.of("free")


def test_modules(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(1)
    with pytest.raises(InvalidConfig, match="not initialised"):
        job.worlds[0].register_module(7)
    job.allocate(100)
    job.worlds[0].register_module(7)
    job.worlds[0].unregister_module(7)
    job.worlds[0].unregister_module(7)
    assert (job.cluster.of("module_init"), job.cluster.of("module_finalize")) == ([(0, 7)], [(0, 7)])
    assert not capsys.readouterr().out
    job.cores[0].fail.add("module_init")
    with pytest.raises(InvalidConfig, match="module_init fails"):
        job.worlds[0].register_module(8)


def test_an_attempt_that_one_rank_left_early_leaves_numbers_alike() -> None:
    """An attempt that one rank left early keeps segment numbers equal: segments of unequal numbers are never reused."""
    job = Job(2)
    in_use = job.allocate(PAGE)
    job.worlds[1]._num_attempts += 1
    made = job.allocate(PAGE)
    addresses = made[0].addresses
    release(made)
    assert job.allocate(PAGE)[0].addresses == addresses
    release(in_use)
