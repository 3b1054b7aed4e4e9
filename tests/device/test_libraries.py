"""The device libraries that kernels are linked with, and the error if one is missing, too old, or for other GPUs."""

from __future__ import annotations

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
        (23102, True, "got NCCL 2.31 in .*, expected 2.32 or newer"),
        (23203, False, "got no libnccl_device.ltoir next to NCCL's headers"),
    ],
)
def test_an_nccl_that_cannot_be_linked(tmp_path: Path, code: int, library: bool, says: str) -> None:
    with pytest.raises(CompileError, match=f"{says}.*; {COMMAND}"):
        NCCL.find(nccl_at(tmp_path, code, library), 13)


def test_an_nccl_that_can(tmp_path: Path) -> None:
    assert NCCL.find(nccl_at(tmp_path, 23203, True), 13).read_bytes() == b"code"


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
