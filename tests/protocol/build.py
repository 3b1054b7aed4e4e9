"""Compiles the C++ test programs against the protocol and engine sources."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "cuda/host"
ROWS, ENGINE = [HOST / "rows.cpp", HOST / "rows_portable.cpp"], [HOST / "engine.cpp", HOST / "engine_ops.cpp"]
FLAGS = ["-std=c++20", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-ffp-contract=off", "-pthread"]


def compile_program(source: str, out: Path, *flags: str) -> Path:
    """Builds tests/protocol/<source> with the portable row primitives, so that sanitizers see every store.

    Optimised, so that threads meet often; not for AddressSanitizer, since that takes three times as long to compile.
    """
    compiler = os.environ.get("CXX", "g++")
    program = Path(__file__).parent / source
    level = "-O0" if any("address" in flag for flag in flags) else "-O1"
    # The emulated GPU has an engine of its own, in headers.
    sources = [program, *ROWS, *([] if "-DMOE_RT_EMULATED_GPU" in flags else ENGINE)]
    subprocess.run([compiler, *FLAGS, level, *flags, *map(str, sources), "-o", str(out)], check=True)
    return out
