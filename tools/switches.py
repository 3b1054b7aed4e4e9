"""Compiles many C++ mutants into one engine and one copy of each test program; a variable chooses one of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path

from engine_sources import ENGINE, ROWS, for_processors, listed
from generated import CPP, Change
from scratch_tree import ScratchTree

CHOSEN = "MOE_RT_GENERATED_MUTANT"
# Device compilers get the unchanged program, and so does what the host's compiler evaluates.
HEADER = f"""#ifndef MOE_RT_SWITCHES
#define MOE_RT_SWITCHES
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define moe_rt_mutant(n) false
#else
#include <cstdlib>
#include <type_traits>
inline int moe_rt_chosen() {{
  static const int chosen = std::getenv("{CHOSEN}") ? std::atoi(std::getenv("{CHOSEN}")) : -1;
  return chosen;
}}
constexpr bool moe_rt_mutant(int n) {{
  if (std::is_constant_evaluated()) return false;
  return moe_rt_chosen() == n;
}}
#endif
#endif
"""
# Units that include every source of the engine and of the emulated GPU, with the compiler's options for each.
UNITS = (
    dict.fromkeys(
        (*ENGINE, *ROWS, *listed("BINDINGS"), "tests/device/emulation.cpp", "tests/device/emulation_gin.cpp"), ()
    )
    | for_processors()
)
FLAGS = ("-std=c++20", "-fsyntax-only", "-w", "-pthread", "-DMOE_RT_EMULATED_NETWORK", "-fmax-errors=0")
FAULT = re.compile(
    r"^(?P<file>[^:\n]+):(?P<line>\d+):\d+: (?:fatal )?error:|^(?P<file2>[^:\n]+):(?P<line2>\d+):\d+:  ", re.M
)


def switched(change: Change, number: int, find: str) -> str:
    """Return code that is `find`, the unchanged code, unless the mutant is chosen; it adds no lines."""
    replace = re.sub(r"//[^\n]*", "", change.replace).replace("\n", " ")
    if change.statement:
        return f"{{ if (moe_rt_mutant({number})) {{ {replace} }} else {{ {find} }} }}"
    if change.operator == "negated" and change.replace.startswith("!"):  # both are bool, whatever the condition is
        return f"(moe_rt_mutant({number}) ? {replace} : !!({find}))"
    return f"(moe_rt_mutant({number}) ? ({replace}) : ({find}))"


def with_switches(changes: list[Change], root: Path) -> dict[str, str]:
    """Return the text of each C++ file with a switch for each change, whose number is its place in the list."""
    texts = {}
    for file in {change.file for change in changes if change.file.endswith(CPP)}:
        here = [(change, number) for number, change in enumerate(changes) if change.file == file]
        text = (root / file).read_text()
        texts[file] = HEADER + f'#line 1 "{file}"\n' + _nested(text, 0, len(text), here)
    return texts


def _nested(text: str, start: int, end: int, some: list[tuple[Change, int]]) -> str:
    """Replace changes of text[start:end]. A change inside another is of the part that the other leaves as it is."""
    parts, at = [], start
    some = sorted(some, key=lambda pair: (pair[0].start, -pair[0].end))
    while some:
        change, number = some.pop(0)
        inner = [pair for pair in some if pair[0].end <= change.end and pair[0].start < change.end]
        some = [pair for pair in some if pair[0].start >= change.end]
        parts += [text[at : change.start], switched(change, number, _nested(text, change.start, change.end, inner))]
        at = change.end
    return "".join((*parts, text[at:end]))


def compiling(changes: list[Change], root: Path) -> list[Change]:
    """Leave out C++ changes that the compiler refuses, or that overlap with another.

    The answer takes minutes, so build/mutants keeps it: the same seed is drawn again once a test has been written.
    """
    cpp = [change for change in changes if change.file.endswith(CPP)]
    if not cpp:
        return changes
    texts = [(root / file).read_text() for file in sorted(compiled_here(root))]
    digest = hashlib.sha256(json.dumps([texts, [astuple(change) for change in changes]]).encode()).hexdigest()[:16]
    path = root / f"build/mutants/compiling.{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    done, places = json.loads(path.read_text()) if path.is_file() else (False, None)
    kept = _apart(changes) if places is None else [changes[place] for place in places]
    while not done:
        refused = _refused(kept, root)
        kept, done = [change for change in kept if change not in refused], not refused
        path.write_text(json.dumps([done, [changes.index(change) for change in kept]]))
    return kept


def _apart(changes: list[Change]) -> list[Change]:
    kept: list[Change] = []
    for change in changes:
        others = [other for other in kept if other.file == change.file and change.file.endswith(CPP)]
        if not any(
            o.start < change.start < o.end < change.end or change.start < o.start < change.end < o.end for o in others
        ):
            kept.append(change)
    return kept


def _included(unit: Path, seen: set[Path]) -> set[Path]:
    """Return a source and what it includes by relative paths."""
    if unit not in seen and unit.is_file():
        seen.add(unit)
        for name in re.findall(r'^#include "([^"]+)"', unit.read_text(), re.MULTILINE):
            _included((unit.parent / name).resolve(), seen)
    return seen


def compiled_here(root: Path) -> set[str]:
    """Return C++ files that the host's compiler compiles: others are for device compilers only."""
    found = {path for unit in UNITS for path in _included((root / unit).resolve(), set())}
    return {path.relative_to(root.resolve()).as_posix() for path in found if path.is_relative_to(root.resolve())}


def _refused(changes: list[Change], root: Path) -> list[Change]:
    includes = [f"-I{sysconfig.get_paths()['include']}"]
    nanobind = find_spec("nanobind")
    if nanobind and nanobind.submodule_search_locations:
        includes.append(f"-I{Path(nanobind.submodule_search_locations[0]) / 'include'}")
    with tempfile.TemporaryDirectory(prefix="moe_rt_switches_") as scratch:
        tree = ScratchTree(root, Path(scratch))
        for file, text in with_switches(changes, root).items():
            (tree.root / file).write_text(text)

        def errors(unit: str) -> str:
            command = [os.environ.get("CXX", "g++"), *FLAGS, *UNITS[unit], *includes, unit]
            done = subprocess.run(command, cwd=tree.root, capture_output=True, text=True)
            if done.returncode and not FAULT.search(done.stderr):  # such as a compiler without enough memory
                raise RuntimeError(f"{unit} was not compiled:\n{done.stderr[:3000]}")
            return done.stderr

        files = {(tree.root / change.file).resolve() for change in changes}
        units = [u for u in UNITS if files & _included((tree.root / u).resolve(), set())]
        with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            said = "".join(pool.map(errors, units))
    places = {(m["file"] or m["file2"], int(m["line"] or m["line2"])) for m in FAULT.finditer(said)}
    found = [change for change in changes if any(_at(change, file, line) for file, line in places)]
    if places and not found:
        raise RuntimeError(f"the compiler refuses what no mutant changed:\n{said[:3000]}")
    return found


def _at(change: Change, file: str, line: int) -> bool:
    last = change.line + change.find.count("\n")
    return file.endswith(change.file) and change.line <= line <= last
