"""The DeepEP dispatchers of real trainers, unchanged, on two CPU ranks."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from compat.test_on_cpu import ON_CPU, run
from support.tool_environments import ROOT, python_of

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("package", "program"), [("megatron-core", "flex_program.py"), ("torchtitan-0.3", "titan_program.py")]
)
def test_forward_and_backward(package: str, program: str) -> None:
    pins = ROOT / "tools" / "third_party" / f"{package}.txt"
    python = python_of("third_party", package, pins, "tools/install_third_party.py")
    packages = sysconfig.get_path("purelib", vars={"base": str(python.parent.parent)})
    paths = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    done = run(*ON_CPU, "--ranks", "2", "--", ON_CPU[0], HERE / program, PYTHONPATH=paths)
    assert done.stdout.count("passed") == 2
