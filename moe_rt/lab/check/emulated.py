"""Run the steps without a GPU, on the tool in a checkout's tests that executes compiled kernels on the CPU."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from moe_rt.engine.gpu.jit import source_dir
from moe_rt.engine.gpu.nvrtc import find_toolkit
from moe_rt.errors import CompileError, InvalidConfig

DEVICE = "emulated"
CARD = {"gpu": "none: kernels were executed on the CPU, so that times and bandwidths below mean nothing"}
PATIENCE = 20  # factor on a GPU's time limits
NPROC = 2  # minimum
# Steps that need a GPU, and where else they are tested.
NOT_REHEARSED = {
    "nvshmem": "NVSHMEM needs a GPU; tests/gpucheck runs this step's processes over shared memory",
    "serving": "vLLM's kernels for experts need a GPU; tests/serving runs this step on a stand-in for one",
    "sanitizer": "compute-sanitizer needs a GPU; the tool that executes kernels checks accesses and races itself",
}


def tests_directory() -> Path:
    """Path of the tests directory that holds the tool.

    Raises:
        InvalidConfig: this is no checkout, or a compiler is missing.
    """
    try:
        tests = source_dir().parent / "tests"
        find_toolkit()
    except CompileError as error:
        raise InvalidConfig(f"--emulated: {error}") from error
    if not (tests / "ptx" / "fake_torch_cuda.py").is_file():
        raise InvalidConfig(
            f"--emulated: got an installed moe_rt, expected a checkout with its tests, since {tests} has no tool that "
            "executes kernels; git clone the repository and run the command there"
        )
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise InvalidConfig(f"--emulated: got no compiler {compiler}, expected one for C++; set CXX to its name")
    return tests


def prepare(step: str) -> Any:
    """Return the emulated GPU for one step. It replaces this process's driver and CPU tensors permanently."""
    sys.path.insert(0, str(tests_directory()))
    from ptx import fake_torch_cuda  # in the checkout's tests

    return fake_torch_cuda.prepare(step)
