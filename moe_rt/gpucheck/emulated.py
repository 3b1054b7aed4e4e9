"""Steps without a GPU: on the tool that executes compiled kernels on the CPU, which a checkout's tests have."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from moe_rt.errors import CompileError, InvalidConfig
from moe_rt.native.jit import source_dir
from moe_rt.native.nvrtc import find_toolkit

DEVICE = "emulated"
CARD = {"gpu": "none: kernels were executed on the CPU, so that times and bandwidths below mean nothing"}
PATIENCE = 20  # times as long as on a GPU, at most
NPROC = 2  # at least
# What only a GPU can do, and where else it is tested.
NOT_REHEARSED = {
    "nvshmem": "NVSHMEM needs a GPU; tests/gpucheck runs this step's processes over shared memory",
    "serving": "vLLM's kernels for experts need a GPU; tests/serving runs this step on a stand-in for one",
    "sanitizer": "compute-sanitizer needs a GPU; the tool that executes kernels checks accesses and races itself",
}


def tests_directory() -> Path:
    """Where the tool is.

    Raises:
        InvalidConfig: this is no checkout, or a compiler is missing.
    """
    try:
        tests = source_dir().parent / "tests"
        find_toolkit()
    except CompileError as error:
        raise InvalidConfig(f"--emulated: {error}") from error
    if not (tests / "ptx" / "rehearsal.py").is_file():
        raise InvalidConfig(
            f"--emulated: got an installed moe_rt, expected a checkout with its tests, since {tests} has no tool that "
            "executes kernels; git clone the repository and run the command there"
        )
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise InvalidConfig(f"--emulated: got no compiler {compiler}, expected one for C++; set CXX to its name")
    return tests


def prepare(step: str) -> Any:
    """The stand-in for a GPU, for one step of this process, whose driver and CPU tensors it takes over for good."""
    sys.path.insert(0, str(tests_directory()))
    from ptx import rehearsal  # of the checkout

    return rehearsal.prepare(step)
