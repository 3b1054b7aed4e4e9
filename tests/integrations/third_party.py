"""Runs cases in the environments that tools/install_third_party.py makes, with the real packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 850
ROOT = Path(__file__).resolve().parents[2]


def third_party_python(name: str) -> Path:
    """The environment of tools/third_party/<name>.txt; skips where there is none, or fails if tools are required."""
    home, pins = Path(sys.prefix) / "third_party" / name, ROOT / "tools" / "third_party" / f"{name}.txt"
    there = home / pins.name
    if not there.is_file() or there.read_text() != pins.read_text():
        reason = f"got no environment of {pins.name}, expected one made by tools/install_third_party.py"
        if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return home / "bin" / "python"


def run_real(name: str, case: str, *arguments: Any) -> Any:
    """What `case` of real_job.py returns there."""
    job = [third_party_python(name), Path(__file__).with_name("real_job.py"), case, json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])
