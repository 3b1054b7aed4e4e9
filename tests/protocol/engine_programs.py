"""Compiles the C++ test programs that run the protocol and the engine."""

from __future__ import annotations

import sys
from pathlib import Path

from support.cpp_programs import ROOT, compile_object, link

sys.path.append(str(ROOT / "tools"))
from engine_sources import ENGINE, ROWS


def compile_program(source: str | Path, *flags: str, more: tuple[Path, ...] = ()) -> Path:
    """Compile tests/protocol/<source> with the portable row primitives, so that sanitizers see every store.

    Not optimised: threads interleave as often, and compilation takes half as long. Orders can be weakened at run time,
    so that the engine is compiled once for each sanitizer.
    """
    flags = ("-O0", "-DMOE_RT_WEAKENABLE", *flags)
    # Row primitives contain no order to weaken. The emulated GPU has a separate, header-only engine.
    plain = tuple(flag for flag in flags if not flag.startswith("-D"))
    engine = () if "-DMOE_RT_EMULATED_GPU" in flags else ENGINE
    objects = [compile_object(path, *flags) for path in (Path(__file__).parent / source, *(ROOT / e for e in engine))]
    objects += [compile_object(path, *plain) for path in (*(ROOT / r for r in ROWS), *more)]
    return link(objects, *flags)
