"""Compiles the C++ test programs that run the protocol and the engine."""

from __future__ import annotations

import sys
from pathlib import Path

from compiled import ROOT, compile_object, link

sys.path.append(str(ROOT / "tools"))
from engine_sources import ENGINE, ROWS


def compile_program(source: str | Path, *flags: str, more: tuple[Path, ...] = ()) -> Path:
    """tests/protocol/<source> with the portable row primitives, so that sanitizers see every store.

    Optimised, so that threads meet often; not for AddressSanitizer, since that takes three times as long to compile.
    """
    flags = ("-O0" if any("address" in flag for flag in flags) else "-O1", *flags)
    # Row primitives hold no order that a macro weakens. The emulated GPU has an engine of its own, in headers.
    plain = tuple(flag for flag in flags if not flag.startswith("-D"))
    engine = () if "-DMOE_RT_EMULATED_GPU" in flags else ENGINE
    objects = [compile_object(path, *flags) for path in (Path(__file__).parent / source, *(ROOT / e for e in engine))]
    objects += [compile_object(path, *plain) for path in (*(ROOT / r for r in ROWS), *more)]
    return link(objects, *flags)
