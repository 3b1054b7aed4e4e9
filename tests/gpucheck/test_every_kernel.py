"""Every kernel compiles and links for every architecture without spills, by the command of docs/cuda.md."""

from __future__ import annotations

import json
import time

from click.testing import CliRunner
from device.jit_tools import require_compiler

from moe_rt.cli import main
from moe_rt.gpucheck.compiling import VARIANTS

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
LIMIT_S = 240.0


def test_compile_only_for_all_architectures() -> None:
    require_compiler()
    begin = time.monotonic()
    archs = [argument for arch in ARCHS for argument in ("--arch", arch)]
    result = CliRunner().invoke(main, ["gpucheck", "--compile-only", *archs])
    assert result.exit_code == 0, result.output[-3000:]
    assert time.monotonic() - begin < LIMIT_S
    document = json.loads(result.output.splitlines()[-1])
    kernels, orders = document["steps"][0]["tables"]
    compiled = {(row[0], row[1], row[2], row[3], row[4]) for row in kernels["rows"]}
    assert len(compiled) == len(VARIANTS) * len(ARCHS)
    assert {row[4] for row in orders["rows"]} == set(ARCHS)
