"""tools/first_gpu/run.sh on the emulated GPU: it needs no network, ends with a short line and leaves a report.

Its run of tests, which needs a real GPU, ends with what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from device.jit_tools import require_compiler

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/first_gpu"


@pytest.mark.parametrize("name", ["prepare.sh", "run.sh"])
def test_syntax(name: str) -> None:
    subprocess.run(["bash", "-n", str(TOOL / name)], check=True)


@pytest.mark.parametrize(("step", "budget", "result"), [("errors", 3600, "ok"), ("smoke", 1, "skipped")])
def test_run(tmp_path: Path, step: str, budget: int, result: str) -> None:
    require_compiler()
    shutil.copy(TOOL / "run.sh", tmp_path)
    tests = ["--exclude", "__pycache__", "pyproject.toml", "tests"]
    pack = ["tar", "-C", ROOT, "-cJf", tmp_path / "tests.tar.xz", *tests]
    subprocess.run(pack, check=True, env={**os.environ, "XZ_OPT": "-0"})
    (tmp_path / "kernels").mkdir(mode=0o775)
    subprocess.run(["tar", "-C", tmp_path, "-cJf", tmp_path / "kernels.tar.xz", "kernels"], check=True)
    environment = {"PYTHON": sys.executable, "OUT": "out", "BUDGET": str(budget + 600), "BENCH_S": "0"}
    command = ["bash", "run.sh", "--emulated", "--only", step, "--budget", str(budget)]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    out = tmp_path / "out"
    assert ran.returncode == 0, ran.stdout + ran.stderr + (out / "gpucheck.log").read_text()
    assert json.loads(ran.stdout)["steps"] == {step: result}
    document = json.loads((out / "report/report.json").read_text())
    assert [record["step"] for record in document["steps"]] == [step]
    assert "moe_rt" in (out / "machine.txt").read_text()
    said = (out / "tests.log").read_text()
    assert "--gpu: got no GPU that torch can use" in said
    assert said.endswith("tests: exit status 4\n")
    assert (out / "kernels").stat().st_mode & 0o777 == 0o700
