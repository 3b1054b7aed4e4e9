"""C++ test programs, compiled once for all tests, workers and runs; build/tests caches each by the text of its sources.

A program is linked from objects, so that an object without a test's macros is compiled once for all tests.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build/tests"
# Line tables are enough debug information for reports.
FLAGS = ("-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-ffp-contract=off", "-pthread")


class NotCompiled(Exception):
    """The compiler rejected a source and printed why. tools/mutants.py searches for this name: it is not a test
    failure."""


def compile_program(source: Path, *flags: str) -> Path:
    """Compile a program of one source, or with -shared a library, using $CXX."""
    return link([compile_object(source, *flags)], *flags)


def compile_object(source: Path, *flags: str) -> Path:
    """Compile one source; the headers of cuda/ and tests/ count as part of it."""
    name = f"{source.stem}-{_digest(*flags, os.path.relpath(source, ROOT))}"
    return kept(name, _digest(_headers(), source.read_text()), *flags, "-c", str(source))


def link(objects: Sequence[Path], *flags: str) -> Path:
    """Link objects of compile_object."""
    stem = objects[0].name.split("-")[0]
    name = f"{stem}-{_digest(*flags, *(path.stem for path in objects))}"
    libraries = [flag for flag in flags if flag.startswith("-l")]  # the linker resolves earlier objects from these
    made_of = _digest(*(path.name for path in objects))
    return kept(f"{name}-linked", made_of, *flags, *map(str, objects), *libraries)


def kept(name: str, made_of: str, *arguments: str) -> Path:
    """Run the compiler unless its output for these sources exists; remove outputs for older sources.

    Workers that need the same output wait for each other.
    """
    compiler = os.environ.get("CXX", "g++")
    name = f"{name}-{_digest(_version(compiler), *FLAGS)}"
    path = KEPT / f"{name}.{made_of}"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = KEPT / f"{name}.partial"
            if subprocess.run([compiler, *FLAGS, *arguments, "-o", str(partial)]).returncode != 0:
                raise NotCompiled(" ".join(arguments))
            for old in set(KEPT.glob(f"{name}.*")) - {partial, KEPT / f"{name}.lock"}:
                old.unlink()
            partial.replace(path)
    return path


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _headers() -> str:
    files = sorted(path for part in ("cuda", "tests") for path in (ROOT / part).rglob("*.h"))
    return "".join(path.read_text() for path in files)
