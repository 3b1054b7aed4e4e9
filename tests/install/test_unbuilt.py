"""A checkout whose engine nobody has built says so, and what to type, before anything else is imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "moe_rt"


@pytest.mark.parametrize("arguments", [["-m", "moe_rt"], ["-m", "moe_rt.train"], ["-c", "import moe_rt"]])
def test_an_unbuilt_checkout_says_what_to_do(arguments: list[str], tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "moe_rt", ignore=shutil.ignore_patterns("__pycache__", "_engine*", "cuda"))
    # -S leaves out what is installed: torch need not be there to be told.
    run = subprocess.run([sys.executable, "-S", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("moe_rt.errors.MissingPackage: got "), run.stderr
    assert "`make install`" in last
    assert "`pip install .`" in last
