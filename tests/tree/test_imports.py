"""torch, whose import takes a second, is imported only by modules that need it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

import moe_rt
from moe_rt.cli import main

LOOK = "import sys; import moe_rt, moe_rt.cli, moe_rt.lab.cluster.cli; sys.exit('torch' in sys.modules)"
FROM_TORCH = """
import sys, torch
loaded = {*sys.modules}
from moe_rt import Buffer, MoELayer
slow = {"sympy", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"}
assert not slow & {*sys.modules} - loaded, slow & {*sys.modules} - loaded
"""
PARTS = {
    part: f"import moe_rt; moe_rt.{part}"
    for part in ("nn.router.RouterConfig", "buffer.buffer.Buffer", "memory.shm", "parallel.prepare", "errors.PeerDead")
}
COMMANDS = ["bench", "calibrate", "chaos", "compile", "diff", "docs", "gpucheck", "info", "nodes", "on-cpu", "plan"]
NAMES = "import moe_rt; missing = {*moe_rt.__all__} - {*dir(moe_rt)}; assert not missing, missing"
CODES = {"torch": LOOK, "from torch": FROM_TORCH, "names": NAMES, **PARTS}


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_in_a_new_process(code: str) -> None:
    """The CLI imports no torch, Buffer and MoELayer no slow part of it, and names resolve before their import."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_commands() -> None:
    """A word that is not a command is refused without a search."""
    result = CliRunner().invoke(main, ["bensh"])
    assert (result.exit_code, "No such command 'bensh'" in result.output) == (2, True)
    listed = CliRunner().invoke(main, ["--help"]).output
    assert re.findall(r"^  ([a-z][a-z-]*) ", listed, re.MULTILINE) == COMMANDS


def test_public_names_and_no_others() -> None:
    assert all(getattr(moe_rt, name).__name__ == name for name in moe_rt.__all__)
    with pytest.raises(AttributeError, match="module 'moe_rt' has no attribute 'Bufer'"):
        _ = moe_rt.Bufer
