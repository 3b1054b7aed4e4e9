"""The project's kernels as PTX and as libraries that a CPU runs, built once for all tests and cached under build/tests.

As a program it compiles one source to PTX: NVRTC crashes in a process that has the stand-in for the driver loaded.
Sources that reach peers over a network are compiled with NVSHMEM's functions declared, and not with its headers.

    python modules.py SOURCE DEFINES_AS_JSON [nvshmem]
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptx.parse import Entry, parse
from ptx.translate import translate
from support.cpp_programs import KEPT, kept

from moe_rt.engine.gpu import jit
from moe_rt.engine.gpu.libraries import NVSHMEM

ARCH = "sm_90a"
HERE = Path(__file__).parent
# Not optimised: most of the time goes into checks, which are compiled once, and a first run waits for this compilation.
_FLAGS = ("-O0", "-g0", "-w", "-shared", "-fPIC", f"-I{HERE}")
_DECLARED = ("nvshmem_stand_in.h", "nvshmem_functions.h")
_TRANSLATOR = (
    *(f"{name}.py" for name in ("parse", "translate", "writer", "instructions", "bulk", "calls")),
    "arithmetic.h",
    "lane.h",
)
_COMPILER = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")


def ptx_of(source: str, defines: Mapping[str, str | int], *, nvshmem: bool = False) -> str:
    """Return the PTX that the just-in-time compiler produces from a source of cuda/gpu for sm_90a."""
    named = json.dumps(dict(sorted(defines.items())))
    path = KEPT / f"{Path(source).stem}-{_digest(_sources(), named, *map(metadata.version, _COMPILER))}.ptx"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            command = [sys.executable, __file__, source, named, *(["nvshmem"] if nvshmem else [])]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            partial = path.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(path)
    return path.read_text()


def image_of(ptx: str) -> tuple[bytes, list[str]]:
    """Return the image that the stand-in for the driver loads, and its kernels' names: PTX under a line of library
    paths."""
    path = KEPT / f"image-{_digest(ptx, _translator())}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if not known or not all(Path(library).exists() for library in known.values()):
        entries = parse(ptx)
        with ThreadPoolExecutor(2) as pool:
            known = {e.name: str(made) for e, made in zip(entries, pool.map(_library, entries), strict=True)}
        with tempfile.NamedTemporaryFile("w", dir=KEPT, delete=False) as partial:
            json.dump(known, partial)
        Path(partial.name).replace(path)
    header = " ".join(["// libraries:", *known.values()])
    return f"{header}\n{ptx}\0".encode(), list(known)


def _library(entry: Entry) -> Path:
    text = translate(entry)
    name = f"ptx-{entry.name}-{_digest(text)}"
    source = KEPT / f"{name}.cpp"
    if not source.exists():
        with tempfile.NamedTemporaryFile("w", dir=KEPT, delete=False) as partial:
            partial.write(text)
        Path(partial.name).replace(source)  # atomic: other workers may be compiling it
    return kept(
        name, _digest(*((HERE / header).read_text() for header in ("arithmetic.h", "lane.h"))), *_FLAGS, str(source)
    )


def _sources() -> str:
    root = jit.source_dir()
    paths = sorted(path for part in ("gpu", "protocol") for path in (root / part).rglob("*") if path.is_file())
    options = Path(jit.__file__).read_text()
    options += "".join((HERE / name).read_text() for name in _DECLARED)
    return "\0".join([options, *(f"{path.relative_to(root)}\0{path.read_text()}" for path in paths)])


@functools.cache
def _translator() -> str:
    return "\0".join([*_FLAGS, *((HERE / name).read_text() for name in _TRANSLATOR)])


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def sources_with(files: Mapping[str, str]) -> Iterator[Path]:
    """Yield a copy of the CUDA sources whose gpu/ also has these files: a root, in the terms of jit."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "cuda"
        for part in ("protocol", "gpu"):
            shutil.copytree(jit.source_dir() / part, root / part)
        for name, text in files.items():
            (root / "gpu" / name).write_text(text)
        yield root


def _compile(source: str, defines: dict[str, str | int], nvshmem: bool) -> str:
    if not nvshmem:
        return jit.compile_ptx(source, ARCH, defines)
    prelude, functions = ((HERE / name).read_text() for name in _DECLARED)
    with sources_with({"nvshmem_prelude.h": prelude, _DECLARED[1]: functions}) as root:
        return jit.compile_ptx(source, ARCH, defines, library=NVSHMEM, root=root)


if __name__ == "__main__":
    print(_compile(sys.argv[1], json.loads(sys.argv[2]), len(sys.argv) > 3))
