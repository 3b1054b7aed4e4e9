"""Helpers for tests of the just-in-time compiler: sources to compile, and ranks that compile concurrently."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.forked_python import commands

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("jit_programs")
MODULES = ("cuda.bindings.nvrtc", "cuda.bindings.nvjitlink", "cuda.pathfinder")
COMPILE = """
import sys
from pathlib import Path
from moe_rt.engine.gpu.jit import compile_kernels

print(compile_kernels("small.cu", "sm_90a", {}, root=Path(sys.argv[1])).from_cache)
"""


def require_compiler() -> None:
    """Skip the test if the compiler's packages are missing, or fail it if they are required."""
    missing = [name for name in MODULES if not _is_there(name)]
    if not missing:
        return
    reason = f"compiling CUDA kernels needs {', '.join(missing)}"
    if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def copy_sources(root: Path) -> Path:
    """Make a directory like cuda/ with the protocol, the prelude and the test programs."""
    shutil.copytree(ROOT / "cuda" / "protocol", root / "protocol")
    shutil.copytree(PROGRAMS, root / "gpu")
    shutil.copy(ROOT / "cuda" / "gpu" / "nvshmem_prelude.h", root / "gpu")
    return root


def write_small_source(root: Path) -> Path:
    """Make a directory like cuda/ with one kernel that compiles quickly, and its header."""
    (root / "protocol").mkdir(parents=True)
    (root / "gpu").mkdir()
    (root / "protocol" / "value.h").write_text("// A header.\n#define VALUE 1\n")
    text = '#include "../protocol/value.h"\nextern "C" __global__ void small(int* out) { *out = VALUE; }\n'
    (root / "gpu" / "small.cu").write_text(text)
    return root


def compile_at_once(root: Path, processes: int, **environment: str) -> tuple[list[bool], list[str]]:
    """Compile the small source in several processes; return whether each found it in the cache, and their standard
    errors.

    Only `environment` may name a cache; the inherited variables that do are removed.
    """
    command = [str(commands() / "python"), "-c", COMPILE, str(root)]
    inherited = {name: value for name, value in os.environ.items() if name not in ("MOE_RT_CACHE", "XDG_CACHE_HOME")}
    how = dict(env=inherited | environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = [subprocess.Popen(command, **how) for _ in range(processes)]  # type: ignore[call-overload]
    outputs = [process.communicate(timeout=3000) for process in running]
    assert all(process.returncode == 0 for process in running), outputs
    return [found.strip() == "True" for found, _ in outputs], [said for _, said in outputs]
