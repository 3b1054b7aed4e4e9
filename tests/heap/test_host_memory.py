"""Memory of ranks on the host: limits to the byte, what the kernel is asked for, and which rank each refusal names."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.errors import (
    CorruptPeer,
    InvalidConfig,
    OutOfSharedMemory,
    SegmentPermission,
)
from moe_rt.memory import loopback, segments, shm, threads, ucx
from moe_rt.memory.segments import PAGE, Segments, free_bytes, no_memory, round_up


@pytest.mark.parametrize("to", [1, 3, 64, PAGE])
def test_sizes_are_rounded_up_to_whole_multiples(to: int) -> None:
    assert PAGE == mmap.PAGESIZE == 4096
    for num_bytes in (0, 1, to - 1, to, to + 1, 2 * to - 1, 2 * to, 2 * to + 1, 10 * to + 1):
        found = round_up(num_bytes, to)
        assert found % to == 0
        assert num_bytes <= found < num_bytes + to


@pytest.mark.parametrize(
    ("address", "num_bytes", "first", "size"),
    [
        (2 * PAGE, 3 * PAGE, 2 * PAGE, 3 * PAGE),
        (2 * PAGE + 1, 3 * PAGE, 3 * PAGE, 2 * PAGE),
        (2 * PAGE - 1, 3 * PAGE, 2 * PAGE, 2 * PAGE),
        (2 * PAGE, 3 * PAGE - 1, 2 * PAGE, 2 * PAGE),
        (2 * PAGE, 3 * PAGE + 1, 2 * PAGE, 3 * PAGE),
    ],
)
def test_huge_pages_are_asked_for_whole_pages(
    monkeypatch: pytest.MonkeyPatch, address: int, num_bytes: int, first: int, size: int
) -> None:
    asked: list[Any] = []
    libc = SimpleNamespace(madvise=lambda at, count, advice: asked.append((at.value, count.value, advice)))
    monkeypatch.setattr(segments.ctypes, "CDLL", lambda name: libc)
    segments.ask_for_huge_pages_at(address, num_bytes)
    assert asked == [(first, size, mmap.MADV_HUGEPAGE)]


def test_a_kernel_without_huge_pages_is_no_error() -> None:
    asked: list[int] = []

    def madvise(advice: int) -> None:
        asked.append(advice)
        raise OSError(errno.EINVAL, "no huge pages")

    mapping: Any = SimpleNamespace(madvise=madvise)
    segments.ask_for_huge_pages(mapping)
    assert asked == [mmap.MADV_HUGEPAGE]


def test_free_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch keeps for itself is given back first, and only GPUs are asked."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (7, 9))
    for device in ("cpu", "meta"):
        assert free_bytes(torch.device(device)) is None
    assert asked == []
    assert free_bytes(torch.device("cuda", 1)) == 7
    assert asked == ["empty", torch.device("cuda", 1)]


def test_errors_that_are_no_lack_of_memory() -> None:
    assert no_memory(ValueError("cannot mmap an empty file"))
    assert not no_memory(OSError(errno.EPERM, "no"))


def test_a_rank_on_another_host_has_a_place_in_every_list() -> None:
    made = Segments([160], [None], [b"mine"], members=[(7, 8)])
    made.add_remote()
    assert (made.addresses, made.watches, made.mappings, made.members) == (
        [160, 0],
        [None, None],
        [b"mine", None],
        [(7, 8), (0, 0)],
    )


def test_what_is_released_is_let_go_of() -> None:
    noted: list[int] = []
    mappings = ["secret"]
    made = Segments([160], [None], mappings, symmetric=5, network="secret", maker="secret",
                    on_release=lambda: noted.append(1))  # fmt: skip
    assert "secret" not in repr(made), "mappings and the like are not shown"
    assert "on_release" not in repr(made)
    made.release()
    assert (made.addresses, made.watches, made.symmetric, made.network) == ([], [], 0, None)
    assert mappings == [], "also for who shares the list"
    assert noted == [1]


@pytest.mark.parametrize(("available", "fits"), [(99, False), (100, True), (101, True)])
def test_segments_take_at_most_what_is_available(monkeypatch: pytest.MonkeyPatch, available: int, fits: bool) -> None:
    monkeypatch.setattr(shm, "available_bytes", lambda: available)
    if fits:
        assert shm.look_for_room(100, 3) == {}
        return
    with pytest.raises(OutOfSharedMemory) as raised:
        shm.look_for_room(100, 3)
    text = "rank 3: got segments of 100 bytes for all ranks of this host, expected at most 99"
    assert (raised.value.args[0], raised.value.rank) == (text, 3)


def test_all_segments_of_the_host_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "available_bytes", lambda: 3 * PAGE - 1)
    errors = ThreadRanks(3).outcomes(lambda group: shm.allocate(group, PAGE, 60.0))
    assert [type(error) for error in errors] == [OutOfSharedMemory] * 3
    assert [error.rank for error in errors] == [0, 1, 2]


def test_a_segment_is_sealed_and_this_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Noting(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            asked.append(option)

    monkeypatch.setattr(shm.mmap, "mmap", Noting)
    opened: list[int] = []
    try:
        record = shm.make_segment(3 * PAGE, opened, 0)
        (fd,) = opened
        found = os.fstat(fd)
        assert (found.st_mode & 0o777, found.st_size) == (0o600, 3 * PAGE)
        assert record == {
            "pid": os.getpid(),
            "fd": fd,
            "dev": found.st_dev,
            "ino": found.st_ino,
            "host": record["host"],
        }
        assert record["host"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert shm._seals(fd) & seals == seals
        assert asked == [mmap.MADV_HUGEPAGE, 23], "huge pages, and all of them now"
    finally:
        os.close(opened[0])


def test_the_descriptor_of_a_segment_that_failed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "fchmod", refuse)
    opened: list[int] = []
    with pytest.raises(SegmentPermission, match="rank 5 could not make a segment"):
        shm.make_segment(PAGE, opened, 5)
    os.close(opened[0])


def test_flags_of_a_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def create(name: str, flags: int) -> int:
        asked.append((name, flags))
        if len(asked) == 1:
            raise OSError(errno.EINVAL, "an older kernel")
        return 99

    monkeypatch.setattr(os, "memfd_create", create)
    assert shm._memfd() == 99
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    assert asked == [("moe_rt", flags | 8), ("moe_rt", flags)]


def test_a_file_has_no_seals(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert shm._seals(file.fileno()) == 0


def record_of(fd: int, **changes: Any) -> dict[str, Any]:
    found = os.fstat(fd)
    return {"pid": os.getpid(), "fd": fd, "dev": found.st_dev, "ino": found.st_ino, "host": "here", **changes}


@pytest.mark.parametrize(("name", "kind"), [("ENOMEM", OutOfSharedMemory), ("EACCES", PermissionError)])
def test_a_segment_that_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception]) -> None:
    opened: list[int] = []
    shm.make_segment(PAGE, opened, 0)

    def refuse(fd: int, num_bytes: int) -> None:
        raise OSError(getattr(errno, name), "no")

    monkeypatch.setattr(shm.mmap, "mmap", refuse)
    try:
        with pytest.raises(kind) as raised:
            shm.attach_segment(2, 1, record_of(opened[0]), PAGE, opened, Segments([], [], []))
        if isinstance(raised.value, OutOfSharedMemory):
            assert raised.value.args[0] == f"rank 2 could not reserve a segment of {PAGE} bytes: no"
            assert raised.value.rank == 2
    finally:
        for fd in opened:
            os.close(fd)


def test_a_segment_that_cannot_be_opened_names_both_ranks() -> None:
    record = {"pid": os.getpid(), "fd": 1 << 20, "dev": 0, "ino": 0, "host": "here"}
    with pytest.raises(SegmentPermission, match="rank 4 cannot open the segment of rank 1") as raised:
        shm.attach_segment(4, 1, record, PAGE, [], Segments([], [], []))
    assert (raised.value.rank, raised.value.peer) == (4, 1)


@pytest.mark.parametrize("me", [0, 1])
def test_segments_of_all_ranks_are_attached_in_order(monkeypatch: pytest.MonkeyPatch, me: int) -> None:
    watched: list[int] = []
    monkeypatch.setattr(shm, "watch", lambda pid: watched.append(pid) or "watch")
    opened: list[int] = []
    for rank in range(2):
        shm.make_segment(PAGE, opened, rank)
    records = [record_of(fd) for fd in opened]
    made = Segments([], [], [])
    try:
        shm._attach_all(me, records, PAGE, opened, made)
        assert made.members == [(record["pid"], record["ino"]) for record in records]
        assert made.watches == [None if rank == me else "watch" for rank in range(2)]
        assert [segments.address_of(mapping) for mapping in made.mappings] == made.addresses
        assert len(opened) == 4
        records[1 - me]["host"] = "elsewhere"
        with pytest.raises(InvalidConfig) as raised:
            shm._attach_all(me, records, PAGE, opened, Segments([], [], []))
        got = f'heap "shm": got rank {1 - me} on another host than rank {me}, expected one host'
        assert raised.value.args[0] == f'{got}; heap "ucx" is for several'
    finally:
        made.release()
        for fd in opened:
            os.close(fd)


def test_a_record_is_checked_before_its_host_is_read() -> None:
    with pytest.raises(CorruptPeer) as raised:
        shm._attach_all(1, [{"pid": 1}, {"host": "here"}], PAGE, [], Segments([], [], []))
    assert (raised.value.rank, raised.value.peer) == (1, 0)


def test_segments_of_threads_are_private_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a fork writes into its own copy."""
    asked: list[Any] = []

    class Noting(mmap.mmap):
        def __new__(cls, fd: int, num_bytes: int, **how: Any) -> Any:
            asked.append((fd, num_bytes, how))
            return super().__new__(cls, fd, num_bytes, **how)

        def madvise(self, option: int, *place: int) -> None:
            asked.append(option)

    monkeypatch.setattr(threads.mmap, "mmap", Noting)
    group = ThreadGroup.make(1)[0]
    made = threads.allocate(group, PAGE, 60.0)
    assert asked == [(-1, PAGE, {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}), mmap.MADV_HUGEPAGE]
    assert (made.watches, made.members, made.maker) == ([None], [(os.getpid(), 0)], group)
    assert not threads._in_transit


@pytest.mark.parametrize("num_bytes", [1 << 62, 1 << 70])
def test_threads_without_memory(num_bytes: int) -> None:
    errors = ThreadRanks(2).outcomes(lambda group: threads.allocate(group, num_bytes, 60.0))
    assert [type(error) for error in errors] == [OutOfSharedMemory] * 2
    assert [error.rank for error in errors] == [0, 1]
    assert any(f"could not reserve a segment of {num_bytes} bytes" in str(error) for error in errors)
    assert not threads._in_transit


def test_another_error_of_the_kernel_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(threads.mmap, "mmap", refuse)
    with pytest.raises(InvalidConfig, match="rank 0 could not make its segment: got PermissionError"):
        threads.allocate(ThreadGroup.make(1)[0], PAGE, 60.0)


def test_other_buffers_of_a_rank() -> None:
    """A rank's other buffers are those made with the same group, while they live."""

    def case(group: ThreadGroup) -> list[int]:
        mine = [threads.allocate(group, PAGE, 60.0) for _ in range(3)]
        found = threads.others_of(mine[1], group.rank)
        assert sorted(map(id, found)) == sorted(map(id, [mine[0], mine[2]]))
        gone = mine.pop()
        assert gone in threads.others_of(mine[0], group.rank)
        gone.release()
        assert threads.others_of(gone, group.rank) == [], "it has no memory any more"
        group.all_gather("", 60.0)  # peers look while this rank has all of them
        return [len(found)]

    assert ThreadRanks(2).run(case) == [[2], [2]]


def test_ranks_that_share_a_gpu_name_themselves() -> None:
    class Full:
        device, uuid = torch.device("cpu"), "one"

        def zeros(self, num_bytes: int) -> Any:
            raise MemoryError(f"{num_bytes} bytes")

    errors = ThreadRanks(2).outcomes(lambda group: loopback.allocate(group, PAGE, 60.0, Full()))  # type: ignore[arg-type]
    assert [type(error) for error in errors] == [OutOfSharedMemory] * 2
    assert [(error.rank, error.peer) for error in errors] == [(0, -1), (1, 0)]


@pytest.mark.parametrize(("length", "taken"), [(4, True), (1 << 16, True), ((1 << 16) + 4, False)])
def test_the_longest_address(length: int, taken: bool) -> None:
    remote = {"address": "A" * length, "secret": 7}
    if taken:
        assert ucx._checked(remote, 0, 1) == (bytes(length // 4 * 3), 7)
        return
    with pytest.raises(CorruptPeer) as raised:
        ucx._checked(remote, 4, 1)
    assert (raised.value.rank, raised.value.peer) == (4, 1)
    assert len(raised.value.args[0]) < 200, "a long one is cut"


@pytest.mark.parametrize("address", ["AA!AA", "AAAA\n", "A", "AAA"])
def test_addresses_have_no_other_letters(address: str) -> None:
    with pytest.raises(CorruptPeer):
        ucx._checked({"address": address, "secret": 7}, 0, 1)


def test_a_place_that_is_none_names_both_ranks() -> None:
    ours = {"where": "here", "version": "1.0.0", "ucx": "1.18.0"}
    with pytest.raises(CorruptPeer, match="place of rank 0: got the record") as raised:
        ucx._agree([{**ours, "ucx": 1.18}, ours], 1)
    assert (raised.value.rank, raised.value.peer) == (1, 0)


def test_the_library_of_the_package_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path), "/elsewhere"])
    monkeypatch.setattr(ucx.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(ucx._engine, "ucx_version", lambda name: "1.13.0")
    assert ucx.library() == "libucp.so.0", "its file is missing"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libucp.so.0").touch()
    assert ucx.library() == str(tmp_path / "lib/libucp.so.0")
    package.submodule_search_locations = None
    assert ucx.library() == "libucp.so.0"
