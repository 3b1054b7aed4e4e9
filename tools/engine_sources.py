"""C++ sources of the CPU engine, as CMakeLists.txt lists them, for every program that is linked with the engine."""

from __future__ import annotations

import platform
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def listed(name: str, root: Path = ROOT) -> tuple[str, ...]:
    """Sources of `set(name ...)`, relative to the root, without those appended for one kind of processor."""
    text = (root / "CMakeLists.txt").read_text()
    found = re.findall(rf"^set\({name} ([^)]*)\)", text, re.M)
    if len(found) != 1:
        raise ValueError(f"CMakeLists.txt has {len(found)} lists set({name} ...), expected one")
    return tuple(found[0].split())


def for_processors(root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """Return the sources for one kind of this machine's processors, each with its options for the compiler."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    text = (root / "CMakeLists.txt").read_text()
    found = re.findall(r'set_source_files_properties\((\S+) PROPERTIES\s+COMPILE_OPTIONS "([^"]+)"\)', text)
    return {source: tuple(options.split(";")) for source, options in found}


ENGINE, ROWS = listed("ENGINE"), listed("ROWS")
