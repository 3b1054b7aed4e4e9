"""The benchmark's MPI contestant runs, and its outputs pass the check that every contestant's outputs pass."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from integrations.third_party import third_party_python


@pytest.mark.sweep
def test_real_mpi(tmp_path: Path) -> None:
    sizes = ["--op", "pair", "--ranks", "2", "--tokens", "4", "--hidden", "64", "--iters", "3"]
    python = third_party_python("mpi")
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [python, "-m", "moe_rt", "bench", *sizes, "--contestants", "moe_rt,mpi"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    (run,) = results["runs"]
    assert run["absent"] == {}
    assert {result["contestant"]: result["errors"] for result in run["results"]} == {"moe_rt": [], "mpi": []}
