"""The compiler writes its log, even an empty one, into dedicated memory, and not into objects that Python shares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from device.jit_tools import require_compiler, write_small_source

SCRIPT = """
import sys
from pathlib import Path
from moe_rt.engine.gpu.jit import compile_kernels, compile_ptx

root = Path(sys.argv[1])
compile_ptx("small.cu", "sm_90a", {}, root=root)
compile_kernels("small.cu", "sm_90a", {}, root=root, cache=False)
# A slice of length one is an object that all of the interpreter shares, unpicklers and file readers among it.
wrong = [i for i in range(256) if ord(bytes(range(256))[i : i + 1]) != i]
assert not wrong, wrong
"""


def test_shared_bytes_stay_as_they_are(tmp_path: Path) -> None:
    require_compiler()
    command = [sys.executable, "-c", SCRIPT, str(write_small_source(tmp_path / "cuda"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
