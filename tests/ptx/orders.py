"""The barriers, fences, releases, acquires and copy waits of a module's kernels, with the source line of each."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from moe_rt.engine.gpu import jit

_FILE = re.compile(r"\.file\s+(\d+) \"(.*)\"")
_LOC = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name \S+, inlined_at (\d+) (\d+) (\d+))?")
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_ORDER = re.compile(
    r"(?:^|\s)(griddepcontrol\.wait|bar\.sync|bar\.warp\.sync|fence\.(?:acq_rel|proxy\.async|mbarrier_init)|atom\.\w+\.acq_rel|"
    r"ld\.acquire|st\.release|cp\.async\.bulk\.wait_group|mbarrier\.try_wait)\b"
)
_CALL = re.compile(r"(nvshmem_quiet|nvshmem_fence)\b")  # the call ends some lines later
# Wrappers, whose lines do not show what is ordered.
_BETWEEN = ("gpu/machine.h", "gpu/bulk.h", "protocol/core/atomics.h")
_DEEPEST = 40
_BARE = re.compile(r"\s*(coop|block|group_)\.sync\(\);")  # ambiguous by itself, so the line above is added

Place = tuple[str, str, str]  # file number, line, column


@dataclass(frozen=True)
class Order:
    """One order. `line` counts from the entry's first line; `place` is the file and line of source that asks for it."""

    entry: str
    line: int
    text: str
    place: str


def orders_of(ptx: str) -> Iterator[Order]:
    files = dict(_FILE.findall(ptx))
    entry, begin = "", 0
    callers: dict[Place, Place] = {}
    last: Place = ("", "", "")
    call = ""
    for number, line in enumerate(ptx.splitlines()):
        if head := _ENTRY.search(line):
            entry, begin, callers = head[1], number, {}
        if loc := _LOC.search(line):
            last = (loc[1], loc[2], loc[3])
            if loc[4]:
                callers[last] = (loc[4], loc[5], loc[6])
        elif entry and _ORDER.search(line):
            yield Order(entry, number - begin + 1, line.strip(), _asked_by(last, callers, files))
        elif entry and (called := _CALL.search(line)):
            call = called[1]
        elif call and ";" in line:
            yield Order(entry, number - begin + 1, call, _asked_by(last, callers, files))
            call = ""


def _asked_by(place: Place, callers: dict[Place, Place], files: dict[str, str]) -> str:
    for _ in range(_DEEPEST):
        path = posixpath.normpath(files.get(place[0], ""))
        for part in ("gpu", "protocol"):
            name = f"{part}/{path.rpartition(f'/{part}/')[2]}"
            source = jit.source_dir() / name
            if f"/{part}/" in path and name not in _BETWEEN and source.is_file():
                before, line = ["", *source.read_text().splitlines()][int(place[1]) - 1 :][:2]
                shown = f"{before.strip()} {line.strip()}" if _BARE.fullmatch(line) else line.strip()
                return f"{name}: {shown}"
        if place not in callers:
            break
        place = callers[place]
    return "nowhere"
