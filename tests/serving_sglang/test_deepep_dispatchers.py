"""SGLang's own DeepEP dispatchers (normal, low latency and V2), unchanged, on two CPU ranks of moe_rt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("deepep_program.py")


def test_sums_of_all_experts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moe_rt", "on-cpu", "--ranks", "2", "--", sys.executable, str(PROGRAM)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("passed") == 2
