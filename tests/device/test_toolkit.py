"""A compiled kernel is found again only with the same toolkit: compiler, linker, headers and device library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from device.jit_tools import require_compiler

from moe_rt.engine.gpu import nvrtc
from moe_rt.engine.gpu.libraries import NVSHMEM

Change = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with headers and a library, which are all that is found; versions are "1"."""
    require_compiler()
    for name in nvrtc._VERSION_HEADERS:
        (tmp_path / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "include" / name).write_text(f"// {name}\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / NVSHMEM.file).write_bytes(b"code")
    monkeypatch.setattr(nvrtc, "find_headers", lambda name: str(tmp_path / "include"))
    monkeypatch.setattr(nvrtc.metadata, "version", lambda package: "1")
    monkeypatch.setattr(nvrtc, "_loaded", lambda name, version: (0, 13, 0))
    nvrtc.find_toolkit.cache_clear()
    yield tmp_path
    nvrtc.find_toolkit.cache_clear()


def rewritten(name: str) -> Change:
    return lambda patch, folder: (folder / name).write_text("// another\n") and None


def package(name: str) -> Change:
    return lambda patch, folder: patch.setattr(nvrtc.metadata, "version", lambda p: "2" if p == name else "1")


def library(name: str) -> Change:
    return lambda patch, folder: patch.setattr(nvrtc, "_loaded", lambda n, version: (0, 13, int(n == name)))


CHANGES: dict[str, Change] = {
    **{name: rewritten(f"include/{name}") for name in nvrtc._VERSION_HEADERS},
    "the device library": rewritten(f"lib/{NVSHMEM.file}"),
    "nvrtc": library("nvrtc"),
    "nvJitLink": library("nvJitLink"),
    **{name: package(name) for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")},
    **{name: package(name) for name in ("nvidia-nvjitlink", "nvidia-nvshmem-cu13")},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_toolkit_has_another_identity(toolkit: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = nvrtc.find_toolkit(NVSHMEM)
    CHANGES[name](monkeypatch, toolkit)
    nvrtc.find_toolkit.cache_clear()
    assert nvrtc.find_toolkit(NVSHMEM).identity != before.identity
    assert before.include == (str(toolkit / "include"),) * 3
    assert before.library_file == str(toolkit / "lib" / NVSHMEM.file)


def test_a_library_is_linked_only_if_it_is_asked_for(toolkit: Path) -> None:
    found = nvrtc.find_toolkit()
    assert (found.nvjitlink, found.library, found.library_file) == (None, None, "")
    assert len(found.include) == 2
