"""Segments on hosts whose kernel seals a memfd against execution, refuses one without that seal, or has no such
seal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
from typing import Any

import pytest
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.errors import CorruptPeer, MoeRtError, OutOfSharedMemory, SegmentPermission
from moe_rt.memory import shm
from moe_rt.memory.segments import Segments, no_memory

NOEXEC_SEAL, F_SEAL_EXEC = 8, 0x20


def allocate() -> None:
    shm.allocate(ThreadGroup.make(1)[0], 4096, 10.0).release()


def add_seals(monkeypatch: pytest.MonkeyPatch, seals: int) -> None:
    """Add seals to what the kernel reports of a memfd, on any kernel."""
    real = fcntl.fcntl

    def with_seals(fd: int, command: int, argument: int = 0) -> Any:
        return real(fd, command, argument) | (seals if command == fcntl.F_GET_SEALS else 0)

    monkeypatch.setattr(shm.fcntl, "fcntl", with_seals)


def test_a_seal_that_the_kernel_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memfd with the seal that vm.memfd_noexec = 1 adds is accepted."""
    add_seals(monkeypatch, F_SEAL_EXEC)
    allocate()


@pytest.mark.parametrize("refuses", ["without the flag", "the flag"])
def test_what_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    """A memfd is made although vm.memfd_noexec = 2 refuses executable ones, or although a kernel before 6.3 lacks the
    flag."""
    real = os.memfd_create

    def refusing(name: str, flags: int) -> int:
        if refuses == "the flag" and flags & NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "Invalid argument")
        if refuses == "without the flag" and not flags & NOEXEC_SEAL:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, flags & ~NOEXEC_SEAL)

    monkeypatch.setattr(os, "memfd_create", refusing)
    allocate()


def test_another_refusal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(name: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", refusing)
    with pytest.raises(SegmentPermission, match=r"rank 0 could not make a segment: .*Permission denied"):
        allocate()


DIFFERENCES = {
    "another size": {"size": 8192},
    "another inode": {"ino": 1 << 40},
    "another device": {"dev": 1 << 40},
    "another user": {"user": os.geteuid() + 1},
    "no seal against shrinking": {"seals": fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL},
    "no seal against growing": {"seals": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL},
    "no seal against seals": {"seals": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW},
}


def inodes_of_descriptors() -> set[int]:
    """Return the memfds that this process has open. Other threads may close descriptors meanwhile."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:"):
                found.add(os.fstat(int(number)).st_ino)
    return found


@pytest.mark.parametrize("changes", [{}, *DIFFERENCES.values()], ids=["as announced", *DIFFERENCES])
def test_a_segment_that_is_not_what_its_rank_announced(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    fd = os.memfd_create("segment", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, changes.get("size", 4096))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, changes.get("seals", shm._SEALS))
    stat = os.fstat(fd)
    record = {"pid": os.getpid(), "fd": fd, "dev": stat.st_dev, "ino": stat.st_ino, "host": "here"}
    record |= {name: value for name, value in changes.items() if name in record}
    segments, opened = Segments([], [], []), [fd]
    user = changes.get("user", os.geteuid())
    monkeypatch.setattr(os, "geteuid", lambda: user)
    try:
        if not changes:
            shm.attach_segment(0, 1, record, 4096, opened, segments)
            assert segments.members == [(os.getpid(), stat.st_ino)]
            return
        with pytest.raises(SegmentPermission, match="segment of rank 1: got device, inode, size") as raised:
            shm.attach_segment(0, 1, record, 4096, opened, segments)
        assert (raised.value.rank, raised.value.peer) == (0, 1)
    finally:
        segments.release()
        for descriptor in opened:
            os.close(descriptor)
    assert stat.st_ino not in inodes_of_descriptors(), "who opened them closes those of refused segments also"


@pytest.mark.parametrize("name", ["ENOSPC", "ENOMEM", "EFAULT", "EFBIG", "EACCES"])
def test_only_a_lack_of_memory_is_one(name: str) -> None:
    assert no_memory(OSError(getattr(errno, name), name)) is (name != "EACCES")
    assert no_memory(OverflowError())


@pytest.mark.parametrize("who", [0, 2])
def test_a_refused_segment_leaves_nothing_on_any_rank(monkeypatch: pytest.MonkeyPatch, who: int) -> None:
    made: list[Segments] = []
    attach = shm.attach_segment

    def refusing(me: int, peer: int, record: Any, num_bytes: int, opened: list[int], segments: Segments) -> None:
        attach(me, peer, record, num_bytes, opened, segments)
        made.extend([segments] * (peer == 0))
        if (me, peer) == (who, 1):
            raise SegmentPermission("another segment", rank=me, peer=peer)

    monkeypatch.setattr(shm, "attach_segment", refusing)
    for _ in range(2):  # some descriptors are opened once
        made.clear()
        gc.collect()  # objects of earlier tests may hold descriptors
        before = len(os.listdir("/proc/self/fd"))
        errors = ThreadRanks(3).outcomes(lambda group: shm.allocate(group, 4096, 60.0))
    assert len(os.listdir("/proc/self/fd")) == before
    assert [type(error) for error in errors] == [SegmentPermission] * 3
    assert [segments.mappings for segments in made] == [[]] * 3, "errors that are kept keep no memory"


@pytest.mark.parametrize("name", ["pid", "host", "fd"])
@pytest.mark.parametrize("value", [None, "1", 1.0, True])
def test_a_record_that_is_none(name: str, value: Any) -> None:
    """No path is formed from a record with another field or a field of another type."""
    record = dict(pid=os.getpid(), fd=0, dev=0, ino=0, host="")
    record |= {name: value} if type(record[name]) is not type(value) else {"another": value}
    with pytest.raises(CorruptPeer, match=r"segment of rank 2: got the record .*, expected the fields") as raised:
        shm.attach_segment(1, 2, record, 4096, [], Segments([], [], []))
    assert (raised.value.rank, raised.value.peer) == (1, 2)


@pytest.mark.parametrize(("name", "kind"), [("ENOMEM", OutOfSharedMemory), ("EPERM", SegmentPermission)])
def test_pages_that_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch, name: str, kind: type[MoeRtError]) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            if option == shm._MADV_POPULATE_WRITE:
                raise OSError(getattr(errno, name), "no pages")

    monkeypatch.setattr(shm.mmap, "mmap", Refusing)
    opened: list[int] = []
    try:
        with pytest.raises(kind, match=r"rank 3 .*no pages"):
            shm.make_segment(4096, opened, 3)
    finally:
        os.close(opened[0])


def test_pages_are_reserved_by_kernels_that_cannot_fault_them_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of memory is an error here, and no signal at the first access."""
    monkeypatch.setattr(shm, "_MADV_POPULATE_WRITE", 10**4)  # which no kernel has
    opened: list[int] = []
    try:
        shm._create(1 << 20, opened)
        assert os.fstat(opened[0]).st_blocks * 512 >= 1 << 20
    finally:
        os.close(opened[0])
