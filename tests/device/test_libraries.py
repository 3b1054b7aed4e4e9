"""The device libraries that kernels are linked with, and the error if one is missing, too old, or for other GPUs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device.jit_tools import require_compiler, write_small_source

from moe_rt.engine.gpu import libraries
from moe_rt.engine.gpu.jit import compile_kernels
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM, Library, find_headers
from moe_rt.errors import CompileError
from moe_rt.lab.check import compiling
from moe_rt.lab.check.compiling import GIN_VARIANTS
from moe_rt.lab.check.steps import Check

COMMAND = r"pip install --no-deps 'nvidia-nccl-cu13>=2\.32'"


def nccl_at(folder: Path, code: int, library: bool) -> str:
    """Write headers of this version, with or without the library."""
    include = folder / "include"
    include.mkdir()
    (include / "nccl.h").write_text(f"#define NCCL_VERSION_CODE {code}\n")
    if library:
        (folder / "lib").mkdir()
        (folder / "lib" / NCCL.file).write_bytes(b"code")
    return str(include)


@pytest.mark.parametrize(
    ("code", "library", "says"),
    [
        (22907, False, "got NCCL 2.29 in .*, expected 2.32 or newer"),
        (23199, True, "got NCCL 2.31 in .*, expected 2.32 or newer"),
        (12832, True, "got NCCL 1.28 in .*, expected 2.32 or newer"),
        (23102, True, "got NCCL 2.31 in .*, expected 2.32 or newer"),
        (23203, False, "got no libnccl_device.ltoir next to NCCL's headers"),
    ],
)
def test_an_nccl_that_cannot_be_linked(tmp_path: Path, code: int, library: bool, says: str) -> None:
    with pytest.raises(CompileError, match=f"{says}.*; {COMMAND}"):
        NCCL.find(nccl_at(tmp_path, code, library), 13)


@pytest.mark.parametrize("code", [23200, 23203, 23300, 30000])
def test_an_nccl_that_can(tmp_path: Path, code: int) -> None:
    assert NCCL.find(nccl_at(tmp_path, code, True), 13).read_bytes() == b"code"


def test_headers_that_state_no_version(tmp_path: Path) -> None:
    include = Path(nccl_at(tmp_path, 23203, True))
    (include / "nccl.h").write_text("// no version")
    with pytest.raises(CompileError, match=r"got NCCL 0\.0 in .*, expected 2.32 or newer"):
        NCCL.find(str(include), 13)


def test_a_library_of_any_version(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    with pytest.raises(CompileError, match=r"got no libnvshmem_device.a next to NVSHMEM.*; pip install"):
        NVSHMEM.find(str(tmp_path / "include"), 13)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnvshmem_device.a").touch()
    assert NVSHMEM.find(str(tmp_path / "include"), 13) == tmp_path / "lib/libnvshmem_device.a"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100f"])
def test_architectures_that_a_library_has_code_for(arch: str) -> None:
    older = arch in ("sm_80", "sm_89")
    assert (NVSHMEM.is_for(arch), NCCL.is_for(arch)) == (True, not older)
    NVSHMEM.require(arch)
    if older:
        with pytest.raises(CompileError, match=f"got architecture '{arch}', expected sm_90 or newer: NCCL's"):
            NCCL.require(arch)
    else:
        NCCL.require(arch)


def test_the_newest_library_of_the_first_wheel_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int]] = []
    monkeypatch.setattr(libraries.ctypes, "CDLL", lambda file, mode: loaded.append((file, mode)))
    roots = [tmp_path / name for name in ("none", "first", "second")]
    monkeypatch.setattr(libraries, "_wheels", lambda: roots)
    for root in roots:
        (root / "cuda_nvrtc/lib").mkdir(parents=True)
    for name in ("libnvrtc.so", "libother.so.12", "libnvrtc-builtins.so.13.0"):
        (roots[0] / "cuda_nvrtc/lib" / name).touch()
    libraries.load_library("nvrtc")
    assert loaded == [], "only a library of that name and a version"
    for root in roots[1:]:
        for name in ("libnvrtc.so.12", "libnvrtc.so.13"):
            (root / "cuda_nvrtc/lib" / name).touch()
    libraries.load_library("nvrtc")
    assert loaded == [(str(roots[1] / "cuda_nvrtc/lib/libnvrtc.so.13"), ctypes.RTLD_GLOBAL)]


@pytest.mark.parametrize(
    ("name", "folder", "header"),
    [
        ("cudart", "cu13/include", "cuda_runtime_api.h"),
        ("cudart", "cuda_runtime/include", "cuda_runtime_api.h"),
        ("cccl", "cu13/include/cccl", "cuda/std/__cccl/version.h"),
        ("cccl", "cuda_cccl/include", "cuda/std/__cccl/version.h"),
        ("nvshmem", "nvshmem/include", "non_abi/nvshmem_version.h"),
        ("nccl", "nccl/include", "nccl.h"),
    ],
)
def test_headers_of_any_wheel_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str, header: str
) -> None:
    require_compiler()
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    roots = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(libraries, "_wheels", lambda: roots)
    (roots[0] / folder).mkdir(parents=True)
    assert find_headers(name) is None, "a folder without the header"
    for root in reversed(roots):
        (root / folder / header).parent.mkdir(parents=True, exist_ok=True)
        (root / folder / header).touch()
        assert find_headers(name) == str(root / folder)
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: f"the path of {name}")
    assert find_headers(name) == f"the path of {name}"


def test_wheels_without_the_namespace_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    assert libraries._wheels() == []


def test_missing_headers_say_what_to_install() -> None:
    with pytest.raises(CompileError, match=f"got no headers of NCCL.*; {COMMAND}"):
        NCCL.find(None, 13)
    with pytest.raises(CompileError, match=r"got no headers of NVSHMEM.*; pip install '\.\[cuda\]'"):
        NVSHMEM.find(None, 13)


@pytest.mark.parametrize("name", ["cudart", "cccl", "nvshmem"])
def test_headers_of_wheels_that_are_not_in_site_packages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    known = find_headers(name)
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    assert find_headers(name) == known


ELSEWHERE = """
import sys, types
moe_rt = types.ModuleType("moe_rt")  # the Python files without the engine, which needs the other environment
moe_rt.__path__ = [sys.argv[1]]
sys.modules["moe_rt"] = moe_rt
from moe_rt.engine.gpu.libraries import NVSHMEM
from moe_rt.engine.gpu.nvrtc import compile_program, find_toolkit
toolkit = find_toolkit(NVSHMEM)
text = "#include <cuda/atomic>\\n__global__ void f() {}"
print(len(compile_program(toolkit, text, "f.cu", ["--gpu-architecture=sm_90a"])[0]))
"""


def test_compiler_and_headers_on_pythonpath() -> None:
    """Wheels on PYTHONPATH, as of `pip install --target`, are found by a Python that has none in site-packages."""
    require_compiler()
    packages = Path(torch.__file__).parents[1]
    package = Path(libraries.__file__).parents[2]
    python = sys._base_executable  # type: ignore[attr-defined]
    ran = subprocess.run(
        [python, "-c", ELSEWHERE, str(package)],
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 0


def test_older_gpus_are_refused_before_anything_is_looked_for(tmp_path: Path) -> None:
    root = write_small_source(tmp_path / "cuda")
    with pytest.raises(CompileError, match="got architecture 'sm_80', expected sm_90 or newer: NCCL's device library"):
        compile_kernels("small.cu", "sm_80", {}, library=NCCL, cache=False, root=root)
    assert not any(variant.is_for("sm_89") for variant in GIN_VARIANTS)
    assert all(variant.is_for(arch) for variant in GIN_VARIANTS for arch in ("sm_90", "sm_90a", "sm_100a"))


def test_compiling_says_why_it_leaves_nccl_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(library: Library) -> None:
        raise CompileError(f"got no {library.name}")

    monkeypatch.setattr(compiling, "find_toolkit", missing)
    check = Check(None, seconds=1.0)
    assert compiling.over_gin(check) == ()
    assert any("not compiled for NCCL's network: got no NCCL" in line for line in check.details)
