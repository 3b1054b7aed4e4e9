"""Calls that reach the CUDA driver: modules, functions, grids and arguments, printed by a libcuda that runs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from device.jit_tools import require_compiler

from moe_rt.engine.gpu import jit
from moe_rt.engine.gpu.driver import waits_for_launches
from moe_rt.engine.gpu.nvrtc import nvrtc_version
from moe_rt.lab.check.compiling import Variant

HERE = Path(__file__).parent
# A launch that may begin before its predecessor has ended.
EARLY = ("launch with attribute 6 of 1", "launch 4 grid 2 1 1 block 32 1 1 shared 7 stream 5 extra 0 words 41 43")


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    """Environment in which libcuda is the stub."""
    source, library = str(HERE / "stub_driver.c"), str(tmp_path / "libcuda.so.1")
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source, "-o", library], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}


def test_buffers_share_loaded_code(stub: dict[str, str]) -> None:
    """Code is loaded once for each device and use, except that of network libraries."""
    command = [sys.executable, str(HERE / "launch_on_stub_job.py"), "share"]
    result = subprocess.run(command, env=stub, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    *_, found = result.stdout.splitlines()
    shares = {"same": True, "shared": False, "network": False, "device": False, "source": False, "again": True}
    assert found == str(shares)
    assert result.stdout.count("function abc") == 5


def test_loading_and_launching(stub: dict[str, str]) -> None:
    command = [sys.executable, str(HERE / "launch_on_stub_job.py"), "launch"]
    result = subprocess.run(command, env=stub, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    told = [line for line in lines if line.startswith(("function", "load", "launch", "context", "set"))]
    assert told == [
        "function abc",
        "function defgh",
        "load 3",
        "load 5",
        "context 77",
        "launch 5 grid 7 1 1 block 64 1 1 shared 99 stream 5 extra 0 words 41 42",
        "launch 3 grid 1 1 1 block 32 1 1 shared 0 stream 0 extra 0 words 41 43",
        "launch 5 grid 2 1 1 block 32 1 1 shared 0 stream 0 extra 0 words 41 43",
        "context 77",  # once per thread
        "launch 3 grid 2 1 1 block 32 1 1 shared 0 stream 0 extra 0 words 41 43",
        "launch 5 grid 1 1 1 block 32 1 1 shared 0 stream 0 extra 0 words 41 43",
        "launch 3 grid 1000 1 1 block 32 1 1 shared 0 stream 0 extra 0 words 41 43",  # refused: no later launch follows
        "function ab",
        "function cdef",
        "load 2",
        "load 4",
        "context 77",
        "launch 2 grid 1 1 1 block 32 1 1 shared 7 stream 5 extra 0 words 41 43",
        *EARLY,
        "launch with attribute 6 of 1",
        "launch 2 grid 3 1 1 block 32 1 1 shared 7 stream 5 extra 0 words 41 43",
        *EARLY,
        # One of these kernels has static shared memory.
        "function abc",
        "function roomy",
        "load 3",
        "load 5",
        "set 5 attribute 8 204800",
        "context 77",
        "launch 3 grid 1 1 1 block 32 1 1 shared 7 stream 5 extra 0 words 41 43",
        "launch with attribute 6 of 1",
        "launch 5 grid 2 1 1 block 32 1 1 shared 204800 stream 5 extra 0 words 41 43",
    ]
    section = "(moe-rt docs errors#launchfailed)"
    assert f"abc: got CUDA_ERROR_INVALID_VALUE from the CUDA driver, expected success {section}" in lines
    assert f"cuModuleLoadData: got CUDA_ERROR_INVALID_IMAGE from the CUDA driver, expected success {section}" in lines


@pytest.mark.parametrize(
    ("arch", "waits"),
    [
        ("sm_80", False),
        ("sm_90a", True),
        pytest.param("sm_89", False, marks=pytest.mark.sweep),
        pytest.param("sm_120a", True, marks=pytest.mark.sweep),
    ],
)
def test_which_kernels_wait_by_themselves(tmp_path: Path, arch: str, waits: bool) -> None:
    """A kernel that only waits does so as its header says; kernels of ops take half a minute to compile."""
    require_compiler()
    root = shutil.copytree(jit.source_dir(), tmp_path / "cuda")
    (root / "gpu/waits.cu").write_text(
        '#include "machine.h"\n'
        'extern "C" __global__ void waits(moe_rt::MappedLinks links, moe_rt::BlockShared* shared) {\n'
        "  moe_rt::CudaMachine<moe_rt::MappedLinks>{links, *shared, nullptr}.await_launch_before();\n}\n"
    )
    ptx = jit.compile_ptx("waits.cu", arch, Variant("kernels.cu", "F32", 20, 3).defines(), root=root)
    assert ("griddepcontrol.wait" in ptx) == waits
    assert waits_for_launches(arch) == waits


@pytest.mark.parametrize(
    "how", [{"MOE_RT_DEPENDENT_LAUNCHES": "0"}, {"STUB_DRIVER": "12020"}], ids=["off", "old driver"]
)
def test_launches_that_must_not_begin_early(stub: dict[str, str], how: dict[str, str]) -> None:
    command = [sys.executable, str(HERE / "launch_on_stub_job.py"), "launch"]
    result = subprocess.run(command, env={**stub, **how}, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("launch with attribute") == 1, "cuda-python's own"


@pytest.mark.parametrize(("version", "package"), [(12040, ".[cuda12]"), (13000, "nvidia-cuda-nvrtc==13.0.*")])
def test_a_driver_older_than_the_compiler(stub: dict[str, str], version: int, package: str) -> None:
    """The error names what to install: a newer driver, or which compiler."""
    require_compiler()
    command = [sys.executable, str(HERE / "launch_on_stub_job.py"), "launch"]
    environment = {**stub, "STUB_DRIVER": str(version)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    told = result.stdout.splitlines()[-1]
    assert told.startswith(f"cuModuleLoadData: got CUDA_ERROR_INVALID_IMAGE from a driver for CUDA {version // 1000}.")
    assert f"pip install '{package}'" in told


def test_a_driver_as_new_as_the_compiler_is_not_called_old(stub: dict[str, str]) -> None:
    require_compiler()
    major, minor = nvrtc_version()
    command = [sys.executable, str(HERE / "launch_on_stub_job.py"), "launch"]
    environment = {**stub, "STUB_DRIVER": str(1000 * major + 10 * minor)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    told = result.stdout.splitlines()[-1]
    assert told.startswith("cuModuleLoadData: got CUDA_ERROR_INVALID_IMAGE from the CUDA driver, expected success")
