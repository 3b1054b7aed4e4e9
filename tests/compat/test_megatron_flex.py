"""The real Megatron-Core's flex dispatcher with its back end deepep, unchanged, on two CPU ranks."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from compat.test_on_cpu import ON_CPU, run
from support.tool_environments import ROOT, python_of

PROGRAM = Path(__file__).with_name("flex_program.py")


def test_forward_and_backward() -> None:
    pins = ROOT / "tools" / "third_party" / "megatron-core.txt"
    python = python_of("third_party", "megatron-core", pins, "tools/install_third_party.py")
    packages = sysconfig.get_path("purelib", vars={"base": str(python.parent.parent)})
    paths = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    done = run(*ON_CPU, "--ranks", "2", "--", ON_CPU[0], PROGRAM, PYTHONPATH=paths)
    assert done.stdout.count("passed") == 2
