"""The machine card, without which figures mean nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moe_rt import _engine
from moe_rt.native.cpu import cache_bytes


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def machine_card() -> dict[str, Any]:
    """Processor, memory, versions, commit and date."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(cores()),
        "cache_mib": cache_bytes() >> 20,
        "memory": _field("/proc/meminfo", "MemTotal"),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moe_rt": version("moe_rt"),
        "isa": isa(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def isa() -> str:
    """Instruction set of new buffers' row primitives: MOE_RT_ISA, or the best of this machine."""
    chosen = os.environ.get("MOE_RT_ISA", "auto")
    return _engine.isas()[-1] if chosen == "auto" else chosen


def commit() -> str:
    """Commit of the tree that contains this package, with a + if tracked files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    with suppress(OSError, subprocess.CalledProcessError):
        head = _output([*git, "rev-parse", "--short", "HEAD"])
        return head + ("+" if _output([*git, "status", "--porcelain", "--untracked-files=no"]) else "")
    return "unknown"


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return "unknown"


def _field(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"
