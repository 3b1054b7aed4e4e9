"""The heap over NCCL on a stand-in: every rank gets every segment, or every rank raises with the reason."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from heap.fake_nccl import DEV_COMM_BYTES, NcclGinConnectionType, plain_dev_comm
from heap.fake_nvshmem import PAGE, HostGpu
from heap.nccl_job import TIMEOUT_S, Job, release
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.errors import InvalidConfig, OutOfSharedMemory, PeerTimeout
from moe_rt.memory import gin, nvshmem
from moe_rt.memory.segments import Segments

MARKS = [256, 512]  # offsets at which a rank of three finds its peers' marks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_reaches_every_segment(size: int) -> None:
    job = Job(size)
    made = job.allocate(5000)
    for rank, segments in enumerate(made):
        assert segments.symmetric == segments.addresses[rank]
        assert segments.addresses == made[0].addresses, "threads have one address space"
        assert segments.gin is not None
        assert segments.gin.window == made[0].addresses[0] + 1, "the stand-in's handle"
        known = ctypes.string_at(segments.gin.communicator, DEV_COMM_BYTES)
        assert known == bytes(plain_dev_comm(rank, size)), "the device's copy"
    assert len(set(made[0].addresses)) == size
    for address in made[0].addresses:
        assert address % PAGE == 0
        assert ctypes.string_at(address, 5000) == bytes(5000)


def test_each_group_has_its_own_communicator_and_the_second_buffer_makes_none() -> None:
    job = Job(3)
    first = job.allocate(100, [2, 0, 1])
    assert sorted(job.cluster.of("init")) == [(0, (1, 3)), (1, (2, 3)), (2, (0, 3))]
    assert [process for process, _ in job.cluster.of("get_unique_id")] == [2]
    second = job.allocate(100, [2, 0, 1])
    assert len(job.cluster.of("init")) == 3
    assert not {s.symmetric for s in first} & {s.symmetric for s in second}
    pair = job.allocate(100, [0, 1])
    assert job.cluster.of("init")[3:] in ([(0, (0, 2)), (1, (1, 2))], [(1, (1, 2)), (0, (0, 2))])
    communicators = {s.gin.communicator for s in [*first, *pair] if s.gin is not None}
    assert len(communicators) == 5


@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize("call", ["load", "init", "mem_alloc", "register_window", "create_dev_comm"])
def test_what_fails_on_one_rank_is_raised_by_all(call: str, faulty_rank: int) -> None:
    job = Job(3)
    job.cores[faulty_rank].fail.add(call)
    if call in ("register_window", "create_dev_comm"):  # inside a collective, where peers wait for this rank
        job.cluster.patience_s = 0.5
        outcomes = ThreadRanks(3).outcomes(allocate_alone, job)
        assert all(isinstance(o, InvalidConfig) for o in outcomes), outcomes
        return
    text = job.refuse(OutOfSharedMemory if call == "mem_alloc" else InvalidConfig)
    assert f"{call} fails in process {faulty_rank}" in text
    assert f"rank {faulty_rank} could not" in text
    assert [core.live for core in job.cores] == [[]] * 3, "what the others got is given back"
    job.cores[faulty_rank].fail.clear()
    job.allocate(100)


def test_an_attempt_that_one_rank_left_early_leaves_numbers_alike() -> None:
    """An attempt that one rank left early keeps segment numbers equal: segments of unequal numbers are never reused."""
    job = Job(2)
    in_use = job.allocate(100)
    (connected,) = job.worlds[1]._groups.values()
    connected.num_attempts += 1
    made = job.allocate(100)
    own = [segments.symmetric for segments in made]
    release(made)
    assert [segments.symmetric for segments in job.allocate(100)] == own
    release(in_use)


def allocate_alone(group: ThreadGroup, job: Job) -> Segments:
    return job.worlds[group.rank].allocate(group, 100, TIMEOUT_S, job.gpus[group.rank])


def test_no_unique_id_is_raised_by_all() -> None:
    job = Job(2)
    job.cores[0].fail.add("get_unique_id")
    assert "rank 0 could not make the unique id" in job.refuse(InvalidConfig)


def test_a_gpu_that_is_full_is_noticed_before_anyone_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    job.gpus[1] = HostGpu(device="meta")
    monkeypatch.setattr(gin, "free_bytes", lambda device: PAGE - 1 if device.type == "meta" else PAGE)
    assert f"got {PAGE - 1} bytes free on meta" in job.refuse(OutOfSharedMemory)
    assert not job.cluster.of("register_window")
    assert job.cores[0].live == []


def test_a_gpu_without_windows_is_refused() -> None:
    job = Job(2)
    job.cores[1].fail.add("window")
    assert "got no window from NCCL" in job.refuse(InvalidConfig)


def test_peers_that_are_not_mapped_need_a_network() -> None:
    job = Job(3)
    job.cores[0].unmapped, job.cores[2].unmapped = {2}, {0, 1}
    made = job.allocate(100)
    own = [s.symmetric for s in made]
    assert [s.addresses for s in made] == [[own[0], own[1], 0], own, [0, 0, own[2]]]
    assert ThreadRanks(3).run(lambda group: job.worlds[group.rank].mapped(group, TIMEOUT_S, job.gpus[group.rank])) == [
        [True, True, False],
        [True, True, True],
        [False, False, True],
    ]
    job = Job(2)
    job.cluster.network = NcclGinConnectionType.RAIL
    job.cores[1].unmapped = {0}
    job.refuse(InvalidConfig)
    text = job.refuse(InvalidConfig)  # what was registered is not handed out
    assert "{'rank 1': [0]}, and no network of NCCL's that connects all GPUs" in text
    job.cores[1].unmapped = set()
    made = job.allocate(100)
    assert [s.gin and s.gin.communicator for s in made] == [0, 0], "nobody needs one"


def test_a_group_whose_network_could_not_be_opened_is_connected_anew() -> None:
    job = Job(2)
    for core in job.cores:
        core.fail.add("create_dev_comm")
    job.refuse(InvalidConfig)
    for core in job.cores:
        core.fail.clear()
    made = job.allocate(100)
    assert len(job.cluster.of("init")) == 4
    assert all(segments.gin and segments.gin.communicator for segments in made)


def test_a_segment_that_could_not_be_zeroed_is_handed_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    job, in_use = Job(2), []
    for num_buffers in (1, 2):  # a new one, while the first one is in use
        with monkeypatch.context() as patch:
            patch.setattr(gin.World, "_zero", lambda *_: {}["zeros"])
            job.refuse(InvalidConfig)
        in_use += job.allocate(100)
        assert len(job.cluster.of("mem_alloc")) == 2 * num_buffers


def test_ranks_that_share_a_gpu_are_refused() -> None:
    job = Job(2)
    job.gpus[1].uuid = job.gpus[0].uuid
    assert f"got ranks [0, 1] on one GPU, {job.gpus[0].uuid}" in job.refuse(InvalidConfig)
    assert not job.cluster.of("init")


def test_sizes_must_agree() -> None:
    outcomes = ThreadRanks(2).outcomes(different_sizes, Job(2))
    assert all(isinstance(o, InvalidConfig) and "got [100, 101] by rank" in str(o) for o in outcomes)


def different_sizes(group: ThreadGroup, job: Job) -> None:
    job.worlds[group.rank].allocate(group, 100 + group.rank, TIMEOUT_S, job.gpus[group.rank])


def test_a_rank_that_stays_away_ends_the_waiting() -> None:
    job = Job(2)
    with pytest.raises(PeerTimeout):
        job.worlds[0].allocate(ThreadGroup.make(2)[0], 100, 0.2, job.gpus[0])


def use(made: list[Segments]) -> list[int]:
    """Act as engines that have run ops; return the address of each rank's segment."""
    for segments in made:
        segments.marks.extend(MARKS)
        ctypes.memset(segments.symmetric, 0x5A, MARKS[0])
    return [segments.symmetric for segments in made]


def leave_marks(addresses: list[int], marks: list[int]) -> None:
    for address in addresses:
        for at in marks:
            ctypes.memset(address + at, 1, 1)  # one of eight bytes


def test_segments_are_reused_zeroed_once_all_has_arrived_in_them() -> None:
    job = Job(3)
    made = job.allocate(2 * PAGE)
    used = use(made)
    release(made[:2])
    leave_marks(used, MARKS)
    other = job.allocate(PAGE)
    assert not {s.symmetric for s in other} & set(used), "one rank has not let go"
    made[2].release()
    again = job.allocate(PAGE)
    assert [s.symmetric for s in again] == used
    assert {ctypes.string_at(address, 2 * PAGE) for address in used} == {bytes(2 * PAGE)}
    assert [s.marks for s in again] == [[]] * 3, "those of the user before are forgotten"


@pytest.mark.parametrize("missing", MARKS)
def test_a_segment_into_which_a_peer_may_still_put_is_not_reused(missing: int) -> None:
    job = Job(3)
    made = job.allocate(PAGE)
    used = use(made)
    release(made)
    leave_marks(used, MARKS)
    ctypes.memset(used[1] + missing, 0, 8)
    ctypes.memset(used[1] + missing - 1, 1, 1)
    ctypes.memset(used[1] + missing + 8, 1, 1)  # a mark has eight bytes
    other = job.allocate(PAGE)
    assert not {s.symmetric for s in other} & set(used)
    leave_marks(used[1:2], [missing])
    assert [s.symmetric for s in job.allocate(PAGE)] == used, "the mark was late"


def test_shutdown_frees_and_lets_start_anew() -> None:
    job = Job(2)
    made = [job.allocate(PAGE), job.allocate(PAGE)]
    assert all("got [2, 2] segments by rank in use" in str(o) for o in job.shutdown())
    used = use(made[0])
    release([*made[0], *made[1]])
    assert all("got [1, 1] segments by rank in use or never closed" in str(o) for o in job.shutdown())
    leave_marks(used, MARKS)
    assert job.shutdown() == [None, None]
    assert [core.live for core in job.cores] == [[], []]
    assert [name for process, name, _ in job.cluster.calls if process == 0][-3:] == ["destroy", "mem_free", "mem_free"]
    assert job.shutdown() == [None, None], "nothing is left to do"
    job.allocate(PAGE)
    assert len(job.cluster.of("init")) == 4


class LateMarks(HostGpu):
    """Work that is queued on the GPU writes marks while the host waits for it."""

    queued: list[int]

    def synchronize(self) -> None:
        super().synchronize()
        for address in self.__dict__.pop("queued", []):
            leave_marks([address], MARKS)


def test_marks_are_read_when_queued_work_is_done() -> None:
    job = Job(3)
    job.gpus[:] = [LateMarks() for _ in range(3)]
    made = job.allocate(PAGE)
    used = use(made)
    release(made)
    leave_marks(used, MARKS)
    ctypes.memset(used[1], 0, MARKS[-1] + 8)
    job.gpus[1].queued = [used[1]]  # type: ignore[attr-defined]
    assert [s.symmetric for s in job.allocate(PAGE)] == used


def test_a_shutdown_frees_nothing_before_queued_work_is_done() -> None:
    job = Job(2)
    seen: list[int] = []

    class Watching(HostGpu):
        def synchronize(self) -> None:
            seen.append(len(job.cluster.of("destroy")) + len(job.cluster.of("mem_free")))

    release(job.allocate(PAGE))
    job.gpus[:] = [Watching() for _ in range(2)]
    job.shutdown()
    assert seen == [0] * 4, "before ranks meet, and before each looks at its segments"


@pytest.mark.parametrize("module", [gin, nvshmem], ids=lambda module: module.__name__.split(".")[-1])
def test_zeros_are_there_before_a_peer_may_write(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """A stream writes the zeros, and no peer's stream waits for it, so the host waits before it says so."""
    done: list[str] = []
    gpu = SimpleNamespace(device=SimpleNamespace(type="cpu"), synchronize=lambda: done.append("waited"))
    data = SimpleNamespace(zero_=lambda: done.append("zeros"))
    allocation = SimpleNamespace(data=data, buffer=SimpleNamespace(fill=lambda value, stream: data.zero_()))
    world = module.World()
    if module is nvshmem:
        monkeypatch.setattr(world, "_current", contextlib.nullcontext)
        monkeypatch.setattr(world, "_device", SimpleNamespace(default_stream=None), raising=False)
    assert world._zero(allocation, gpu) == {}
    assert done == ["zeros", "waited"]
