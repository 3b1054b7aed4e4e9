"""Segments of other processes, made up as files of this one, and of other buffers in which a late rank waits."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diagnostics.test_words_of_reports import op

from moe_rt.diagnostics import attach, elsewhere
from moe_rt.diagnostics.attach import segments_of
from moe_rt.errors import InvalidConfig, SegmentPermission
from moe_rt.memory import threads

attaching = import_module("moe_rt.diagnostics.attach")  # the package has a function of this name
Make = Callable[..., int]


@pytest.fixture
def make() -> Iterator[Make]:
    """Yield a function that opens a file of memory and returns its inode."""
    files: list[int] = []

    def of(name: str = "moe_rt", content: bytes = b"x", seals: int = fcntl.F_SEAL_SHRINK) -> int:
        files.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.write(files[-1], content)
        fcntl.fcntl(files[-1], fcntl.F_ADD_SEALS, seals)
        return os.fstat(files[-1]).st_ino

    yield of
    for file in files:
        os.close(file)


def test_which_files_are_segments(make: Make) -> None:
    """Sealed ones of that name with a content; others are no segments, or could shrink."""
    before = segments_of(os.getpid()).keys()
    first, second = make(content=b"first"), make(content=b"second", seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    make("other")
    make("moe_rt2")
    make(content=b"")
    make(seals=fcntl.F_SEAL_GROW)
    found = {inode: segment for inode, segment in segments_of(os.getpid()).items() if inode not in before}
    assert {inode: bytes(segment) for inode, segment in found.items()} == {first: b"first", second: b"second"}
    with pytest.raises(TypeError):
        found[first][0] = 0


def test_a_file_that_is_closed_meanwhile_is_left_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    inode, readlink = make(), os.readlink
    gone: list[str] = []

    def closing(path: str) -> str:
        if not gone:
            gone.append(path)
            raise FileNotFoundError
        return readlink(path)

    monkeypatch.setattr(os, "readlink", closing)
    assert inode in segments_of(os.getpid())
    assert len(gone) == 1


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (PermissionError(), SegmentPermission, "process 7: got no permission to read its descriptors: why of 7 "),
        (FileNotFoundError(), InvalidConfig, "pid: got 7, which is no process here, expected a rank of a buffer "),
        (ProcessLookupError(), InvalidConfig, "pid: got 7, which is no process here, expected a rank of a buffer "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_processes_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[Exception], words: str
) -> None:
    def listdir(path: str) -> list[str]:
        assert path == "/proc/7/fd"
        raise error

    monkeypatch.setattr(attaching, "why_closed", lambda pid: f"why of {pid}")
    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(kind) as raised:
        segments_of(7)
    assert str(raised.value).startswith(words)


class Processes:
    """A tree of processes: 1 has started 2 and 3, and 3 has started 4; each has the segments that a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, segments: dict[int, Any]) -> None:
        parents = {1: 0, 2: 1, 3: 1, 4: 3, 5: 0}
        for pid, parent in parents.items():
            (path / str(pid)).mkdir()
            (path / f"{pid}/stat").write_bytes(b"%d (a ) 9 \xff) S %d 8 8\n" % (pid, parent))
        (path / "6").mkdir()  # it has ended meanwhile
        (path / "self").mkdir()
        self.asked: list[int] = []

        def segments_of(pid: int) -> Any:
            self.asked.append(pid)
            found = segments.get(pid, {})
            if isinstance(found, Exception):
                raise found
            return found

        names = [each.name for each in path.iterdir()]
        monkeypatch.setattr(attaching, "segments_of", segments_of)
        monkeypatch.setattr(attaching.os, "listdir", lambda where: names if where == "/proc" else [])
        opened = lambda name, **how: (path / name.removeprefix("/proc/")).open(**how)  # noqa: E731
        monkeypatch.setattr(attaching, "open", opened, raising=False)


def mapping_of(*members: tuple[int, int]) -> Any:
    return SimpleNamespace(members=list(members))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are made up of the members that they name; reports are what they were asked for."""

    def read_segment(mapping: Any) -> Any:
        if mapping is None:
            raise ValueError
        return mapping

    monkeypatch.setattr(attaching._engine, "read_segment", read_segment)
    monkeypatch.setattr(attaching, "report_on", lambda *given: given)


@pytest.mark.usefixtures("groups")
def test_groups_of_a_process_and_of_those_that_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is reported once, with the segments that any of the processes has open."""
    pair, single = [(2, 20), (4, 40)], [(3, 30)]
    of_pair, of_single = mapping_of(*pair), mapping_of(*single)
    segments = {
        2: {20: of_pair},
        3: SegmentPermission("of another user"),
        4: {20: of_pair, 30: of_single, 99: None},
    }
    processes = Processes(monkeypatch, tmp_path, segments)
    expected = [
        (tuple(pair), [of_pair, None], [None, None]),
        (tuple(single), [of_single], [None]),
    ]
    assert attach(1) == expected
    assert processes.asked[0] == 1
    assert sorted(processes.asked) == [1, 2, 3, 4]
    del processes.asked[:]
    assert attach(4) == expected
    assert processes.asked == [4]


@pytest.mark.usefixtures("groups")
def test_a_process_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Processes(monkeypatch, tmp_path, {2: {20: None}, 3: InvalidConfig("it has ended")})
    with pytest.raises(InvalidConfig) as raised:
        attach(1)
    assert str(raised.value).startswith(
        'pid: got process 1 without a buffer, expected a rank of one with heap "shm", or what has started it'
    )
    Processes(monkeypatch, tmp_path_of(tmp_path), {1: SegmentPermission("of another user")})
    with pytest.raises(SegmentPermission, match=r"^of another user"):
        attach(1)


def tmp_path_of(path: Path) -> Path:
    (path / "more").mkdir()
    return path / "more"


OWN, PEER = os.getpid(), 7
HERE = [(OWN, 1), (PEER, 2)]  # ranks 0 and 1 of the buffer in which rank 0 waits for rank 1


def waiting(*waits_for: int, end_ns: int = 0) -> Any:
    return SimpleNamespace(waits_for=list(waits_for), last_ops=[op(8), op(9, "combine", end_ns=end_ns)])


class Seen:
    """Other buffers of the late rank, each with its members and what that rank does there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *groups: tuple[list[tuple[int, int]], Any]) -> None:
        self.reports = {tuple(members): found for members, found in groups}
        self.asked: list[Any] = []
        mappings = {n: mapping_of(*members) for n, members in enumerate([*self.reports, tuple(HERE)])}
        self.segments: Any = SimpleNamespace(members=HERE)

        def segments_of(pid: int) -> Any:
            assert pid == PEER
            return {**mappings, 99: None}

        def read_segment(mapping: Any) -> Any:
            if mapping is None:
                raise ValueError
            return mapping

        def report_on(members: Any, mappings: Any, watches: Any) -> Any:
            self.asked.append((members, len(mappings), watches))
            late = [member for member, _ in members].index(PEER)
            return SimpleNamespace(ranks={late: self.reports[tuple(members)]})

        monkeypatch.setattr(elsewhere, "segments_of", segments_of)
        monkeypatch.setattr(elsewhere._engine, "read_segment", read_segment)
        monkeypatch.setattr(elsewhere, "report_on", report_on)

    def said(self, since_ns: int = 100) -> str:
        return elsewhere.elsewhere(self.segments, 0, 1, since_ns)


def test_a_late_rank_that_waits_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [(5, 50), (PEER, 70), (OWN, 60)]
    seen = Seen(monkeypatch, (members, waiting(2)))
    assert seen.said() == (
        "rank 1 waits in combine #9 of another buffer of 3 ranks, for this rank: all ranks must use their buffers in "
        "the same order"
    )
    assert seen.asked == [(members, 3, [None] * 3)]
    seen = Seen(monkeypatch, (members, waiting(0, 2)))
    assert "for this rank" in seen.said()


def test_a_late_rank_that_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for members in ([(PEER, 70), (5, 50), (6, 60)], [(PEER, 70), (OWN, 50), (6, 60)], [(PEER, 70), (5, 50), (OWN, 60)]):
        said = Seen(monkeypatch, (members, waiting(1, 2))).said()
        here = any(pid == OWN for pid, _ in members)
        assert ("for this rank" in said) == here
        assert here or said == "rank 1 waits in combine #9 of another buffer of 3 ranks, for ranks 1 and 2 there"


def test_a_late_rank_that_waits_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in this buffer, nor in one without it, nor in an op that had ended before this rank began to wait."""
    members = [(PEER, 70), (OWN, 50)]
    assert Seen(monkeypatch).said() == ""
    assert Seen(monkeypatch, ([(5, 50), (6, 60)], waiting(1))).said() == ""
    assert Seen(monkeypatch, (members, waiting())).said() == ""
    assert Seen(monkeypatch, (members, waiting(1, end_ns=99))).said() == ""
    for end_ns in (100, 101, 0):
        assert "for this rank" in Seen(monkeypatch, (members, waiting(1, end_ns=end_ns))).said()
    other = [(PEER, 71), (OWN, 51)]
    for order in ((members, waiting()), (other, waiting(1))), ((other, waiting(1)), (members, waiting())):
        assert "for this rank" in Seen(monkeypatch, *order).said()


@pytest.mark.parametrize("error", [SegmentPermission("of another user"), OSError(errno.ENOMEM, "none")])
def test_a_late_rank_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    seen = Seen(monkeypatch)

    def segments_of(pid: int) -> Any:
        raise error

    monkeypatch.setattr(elsewhere, "segments_of", segments_of)
    assert seen.said() == ""


def test_a_late_rank_that_is_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other buffers have the same ranks; one that is closed is left out."""
    members = [(OWN, 0), (OWN, 0)]
    others = [SimpleNamespace(members=members, mappings=found) for found in ([], ["a", "b"])]
    segments: Any = SimpleNamespace(members=members)

    def others_of(given: Any, rank: int) -> Any:
        assert (given, rank) == (segments, 1)
        return others

    def report_on(given: Any, mappings: Any, watches: Any) -> Any:
        assert (given, mappings, watches) == (members, ["a", "b"], [None, None])
        return SimpleNamespace(ranks=[waiting(), waiting(0)])

    monkeypatch.setattr(threads, "others_of", others_of)
    monkeypatch.setattr(elsewhere, "report_on", report_on)
    assert elsewhere.elsewhere(segments, 0, 1, 0).endswith(
        "of 2 ranks, for this rank: all ranks must use their buffers in the same order"
    )
