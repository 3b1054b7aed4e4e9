"""The project's kernels as PTX and as libraries that a CPU runs, made once for all tests and kept under build/tests.

As a program it compiles one source to PTX: NVRTC crashes in a process that has the stand-in for the driver loaded.

    python modules.py SOURCE DEFINES_AS_JSON
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compiled import KEPT, kept
from ptx.parse import Entry, parse
from ptx.translate import translate

from moe_rt.native import jit

ARCH = "sm_90a"
_HERE = Path(__file__).parent
# Not optimised: most of the time goes into checks, which are compiled once; compiling is what a first run waits for.
_FLAGS = ("-O0", "-g0", "-w", "-shared", "-fPIC", f"-I{_HERE}")
_COMPILER = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")


def ptx_of(source: str, defines: Mapping[str, str | int]) -> str:
    """What the just-in-time compiler makes of a source of cuda/device for sm_90a, as PTX."""
    named = json.dumps(dict(sorted(defines.items())))
    path = KEPT / f"{Path(source).stem}-{_digest(_sources(), named, *map(metadata.version, _COMPILER))}.ptx"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            command = [sys.executable, __file__, source, named]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            partial = path.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(path)
    return path.read_text()


def image_of(ptx: str) -> tuple[bytes, list[str]]:
    """What the stand-in for the driver loads, and the names of its kernels: PTX under a line that names libraries."""
    entries = parse(ptx)
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(_library, entries))
    header = " ".join(["// libraries:", *map(str, libraries)])
    return f"{header}\n{ptx}\0".encode(), [entry.name for entry in entries]


def _library(entry: Entry) -> Path:
    text = translate(entry)
    name = f"ptx-{entry.name}-{_digest(text)}"
    source = KEPT / f"{name}.cpp"
    if not source.exists():
        with tempfile.NamedTemporaryFile("w", dir=KEPT, delete=False) as partial:
            partial.write(text)
        Path(partial.name).replace(source)  # in one step: other workers may be compiling it
    return kept(
        name, _digest(*((_HERE / header).read_text() for header in ("arithmetic.h", "lane.h"))), *_FLAGS, str(source)
    )


def _sources() -> str:
    root = jit.source_dir()
    paths = sorted(path for part in ("device", "protocol") for path in (root / part).rglob("*") if path.is_file())
    options = Path(jit.__file__).read_text()
    return "\0".join([options, *(f"{path.relative_to(root)}\0{path.read_text()}" for path in paths)])


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(jit.compile_ptx(sys.argv[1], ARCH, json.loads(sys.argv[2])))
