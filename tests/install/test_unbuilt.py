"""A checkout without a built engine says so, and what to type; a build that finds no compiler does also."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "moe_rt"


@pytest.mark.parametrize("arguments", [["-m", "moe_rt"], ["-m", "moe_rt.train"], ["-c", "import moe_rt"]])
def test_an_unbuilt_checkout_says_what_to_do(arguments: list[str], tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "moe_rt", ignore=shutil.ignore_patterns("__pycache__", "_engine*", "cuda"))
    # -S leaves out installed packages: the message must not need torch.
    run = subprocess.run([sys.executable, "-S", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("moe_rt.errors.MissingPackage: got "), run.stderr
    assert "`make install`" in last
    assert "`pip install .`" in last


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed; pip brings its own")
def test_a_build_without_a_compiler_says_what_to_do(tmp_path: Path) -> None:
    run = subprocess.run(
        ["cmake", "-S", PACKAGE.parent, "-B", tmp_path], capture_output=True, text=True, timeout=3000,
        env={**os.environ, "CXX": str(tmp_path / "nowhere")},
    )  # fmt: skip
    assert run.returncode == 1
    assert "apt-get install g++" in " ".join(run.stderr.split()), run.stderr
