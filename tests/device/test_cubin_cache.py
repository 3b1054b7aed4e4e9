"""The directory of compiled kernels when an entry cannot be saved, and its keys; test_jit.py has the rest."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import stat
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from device.jit_tools import compile_at_once, require_compiler, write_small_source

from moe_rt.engine.gpu import cubins as cubin_cache
from moe_rt.engine.gpu import jit
from moe_rt.engine.gpu.cubins import CubinCache, open_cache


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home's cache, with an entry that an image contains; it cannot be written now, even by root."""
    monkeypatch.delenv("MOE_RT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "image"))
    monkeypatch.setattr(cubin_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cubin_cache, "_warn", lambda message: warnings.warn(message, RuntimeWarning, stacklevel=1))
    with open_cache() as cache:
        assert cache is not None
        cache.save("old", {}, b"of the image")
    access = os.access
    image = tmp_path / "image" / "moe_rt"
    monkeypatch.setattr(os, "access", lambda path, mode: not image.samefile(path) and access(path, mode))
    return image


def entries(keys: str, save: str = "") -> list[bytes | None]:
    """Return the payloads of keys, and save an entry under another key."""
    with open_cache() as cache:
        assert cache is not None
        found = [entry and entry[1] for entry in map(cache.load, keys.split())]
        if save:
            cache.save(save, {}, b"code")
        return found


def test_where_the_directory_is_read_only_another_takes_new_entries(read_only: Path, tmp_path: Path) -> None:
    says = "kept in .*/moe_rt-[0-9]+ only: .*/image/moe_rt cannot be written"
    with pytest.warns(RuntimeWarning, match=says):
        assert entries("old new", save="new") == [b"of the image", None]
    with pytest.warns(RuntimeWarning, match=says):
        assert entries("old new") == [b"of the image", b"code"]
    assert [path.name for path in read_only.iterdir()] == ["old.cubin"]
    assert [path.name for path in (tmp_path / f"moe_rt-{os.geteuid()}").iterdir()] == ["new.cubin"]


@pytest.mark.parametrize("refused", [True, False])
def test_a_lock_protects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """The work is done without the lock if its file cannot be made, or another process keeps it."""
    monkeypatch.setenv("MOE_RT_CACHE", str(tmp_path))
    done = []
    with open_cache() as cache:
        assert cache is not None
        with cache.lock("key", 0.0):
            if refused:
                (tmp_path / "other.lock").symlink_to(tmp_path)  # nothing is opened through a link
            with cache.lock("other" if refused else "key", 0.0):
                done.append("work")
            assert (tmp_path / "key.lock").exists(), "who did not get the lock leaves it to its holder"
    assert done == ["work"]
    assert not (tmp_path / "key.lock").exists()


def test_who_names_a_directory_gets_no_other(read_only: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_RT_CACHE", str(read_only))
    with pytest.warns(RuntimeWarning, match="kernels are not kept: .*/image/moe_rt cannot be written"):
        assert entries("old") == [b"of the image"]
    assert not list(tmp_path.glob("moe_rt-*"))


def test_a_temporary_directory_of_others_is_not_used(read_only: Path, tmp_path: Path) -> None:
    other = tmp_path / f"moe_rt-{os.geteuid()}"
    other.mkdir()
    other.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="kernels are not kept: "):
        assert entries("old") == [b"of the image"]
    assert not list(other.iterdir())


@pytest.mark.parametrize("what", ["a link", "a file"])
def test_only_a_directory_is_used(tmp_path: Path, what: str) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    place = tmp_path / "place"
    place.symlink_to(tmp_path / "other") if what == "a link" else place.touch(mode=0o700)
    with pytest.raises(OSError, match=r"\[Errno (17|20|40)\]"):
        CubinCache(place)


def test_an_entry_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory at the entry's path stays and is not read as an entry; no temporary file remains."""
    tmp_path.chmod(0o700)
    (tmp_path / "key.cubin").mkdir()
    monkeypatch.setenv("MOE_RT_CACHE", str(tmp_path))
    with open_cache() as cache:
        assert cache is not None
        with pytest.warns(RuntimeWarning, match="are not kept: .*key.cubin"):
            cache.save("key", {}, b"code")
        assert cache.load("key") is None
    assert [path.name for path in tmp_path.iterdir()] == ["key.cubin"]


def test_ranks_without_a_home_share_a_temporary_directory(tmp_path: Path) -> None:
    """Four ranks without a writable home, as in a container, share a temporary directory: one compiles, all report the
    path."""
    require_compiler()
    small = write_small_source(tmp_path / "cuda")
    found, said = compile_at_once(small, 4, HOME="/proc/nobody", TMPDIR=str(tmp_path))
    assert sorted(found) == [False, *[True] * 3]
    shared = tmp_path / f"moe_rt-{os.geteuid()}"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    assert [path.suffix for path in shared.iterdir()] == [".cubin"]
    assert all(f"RuntimeWarning: compiled kernels are kept in {shared} only: " in text for text in said)


def test_what_was_compiled_with_other_options_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    job = jit._Job("small.cu", "sm_90a", {}, None, root=write_small_source(tmp_path / "cuda"))
    options, key = job._options(), job.key()
    assert job.key() == key
    monkeypatch.setattr(job, "_options", lambda: [*options, "--define-macro=ANOTHER"])
    assert job.key() != key


def open_descriptors() -> int:
    gc.collect()  # garbage of other tests may hold descriptors, and must not be collected between two counts
    return len(os.listdir("/proc/self/fd"))


def test_an_entry_is_a_line_of_facts_and_the_code(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "deep" / "place")
    facts = {"kernel": {"registers": 4}, "another": 1}
    cache.save("key", facts, b"\x7fELF\ncode")
    (entry,) = (tmp_path / "deep/place").iterdir()
    assert (entry.name, stat.S_IMODE(entry.stat().st_mode)) == ("key.cubin", 0o600)
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    line, _, payload = entry.read_bytes().partition(b"\n")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + b"\n" + payload).hexdigest()
    assert json.loads(line) == {"format": 1, "key": "key", "sha256": digest, "facts": facts}
    assert cache.load("key") == (facts, payload) == (facts, b"\x7fELF\ncode")
    assert cache.load("other") is None
    cache.close()


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"key": "other"},
        {"sha256": "0" * 64},
        {"facts": {"a": 2}},
        {"facts": None},
    ],
    ids=str,
)
def test_an_entry_that_is_not_what_it_says_is_not_loaded(tmp_path: Path, change: dict[str, Any]) -> None:
    cache = CubinCache(tmp_path / "place")
    cache.save("key", {"a": 1}, b"code")
    entry = tmp_path / "place/key.cubin"
    line, _, payload = entry.read_bytes().partition(b"\n")
    entry.write_bytes(json.dumps({**json.loads(line), **change}).encode() + b"\n" + payload)
    assert cache.load("key") is None
    cache.close()


@pytest.mark.parametrize(("mode", "is_private"), [(0o600, True), (0o644, True), (0o620, False), (0o602, False)])
def test_an_entry_that_others_can_write_is_not_loaded(tmp_path: Path, mode: int, is_private: bool) -> None:
    cache = CubinCache(tmp_path / "place")
    cache.save("key", {}, b"code")
    (tmp_path / "place/key.cubin").chmod(mode)
    assert (cache.load("key") is not None) is is_private
    cache.close()


@pytest.mark.parametrize(("mode", "is_private"), [(0o700, True), (0o755, True), (0o720, False), (0o702, False)])
def test_a_directory_that_others_can_write_is_not_opened(tmp_path: Path, mode: int, is_private: bool) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    before = open_descriptors()
    if is_private:
        CubinCache(place).close()
    else:
        with pytest.raises(PermissionError, match=f"{place} belongs to another user or can be written by others"):
            CubinCache(place)
    assert open_descriptors() == before


def test_a_cache_and_those_beneath_it_are_closed_and_searched_in_order(tmp_path: Path) -> None:
    before = open_descriptors()
    beneath = CubinCache(tmp_path / "beneath")
    beneath.save("both", {}, b"beneath")
    beneath.save("one", {}, b"beneath")
    cache = CubinCache(tmp_path / "above", beneath)
    cache.save("both", {}, b"above")
    assert cache.load("both") == ({}, b"above")
    assert cache.load("one") == ({}, b"beneath")
    assert cache.load("none") is None
    with cache.lock("key", 1.0):
        assert open_descriptors() == before + 3
    cache.close()
    assert open_descriptors() == before, "of locks also"


@pytest.mark.parametrize("writable", [True, False])
def test_a_directory_is_written_if_files_can_be_made_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    cache = CubinCache(tmp_path / "place")
    asked: list[int] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(mode) or writable)
    assert cache.is_writable() is writable
    assert asked == [os.W_OK | os.X_OK]
    cache.close()


def test_an_entry_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache(tmp_path / "place")
    warned: list[str] = []
    monkeypatch.setattr(cubin_cache, "_warn", warned.append)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    cache.save("key", {}, b"code")
    assert list((tmp_path / "place").iterdir()) == []
    assert warned == ["compiled kernels are not kept: [Errno 28] No space left on device"]
    cache.close()


@pytest.mark.parametrize("free_after", [0, 1, 3])
def test_a_lock_is_waited_for_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_after: int
) -> None:
    cache, tries = CubinCache(tmp_path / "place"), list[float]()
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        assert 0 < seconds < 1
        clock.now += 1.0

    def flock(fd: int, how: int) -> None:
        assert how == fcntl.LOCK_EX | fcntl.LOCK_NB
        tries.append(clock.now)
        if len(tries) <= free_after:
            raise BlockingIOError

    monkeypatch.setattr(cubin_cache, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(cubin_cache.fcntl, "flock", flock)
    with cache.lock("key", 2.0):
        is_held = free_after < 3  # at 100, 101 and 102, after which the time is up
        assert (tmp_path / "place/key.lock").exists()
        assert tries == [100.0 + number for number in range(min(free_after, 2) + 1)]
    assert (tmp_path / "place/key.lock").exists() is not is_held
    cache.close()


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ("/own", "/shared", "/own"),
        ("", "/shared", "/shared/moe_rt"),
        ("", "", "/home/user/.cache/moe_rt"),
        (None, None, "/home/user/.cache/moe_rt"),
    ],
)
def test_places_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, own: str | None, shared: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    for name, value in (("MOE_RT_CACHE", own), ("XDG_CACHE_HOME", shared)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert str(cubin_cache.cache_directory()) == expected
