"""The directory of compiled kernels when an entry cannot be saved, and its keys; test_jit.py has the rest."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

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
