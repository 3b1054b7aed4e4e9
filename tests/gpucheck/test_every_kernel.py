"""Every kernel compiles and links without spills, by the command of docs/cuda.md, and some for more architectures."""

from __future__ import annotations

import json
import time

from click.testing import CliRunner
from device.jit_tools import require_compiler

from moe_rt.cli import main
from moe_rt.gpucheck.compiling import LARGEST, NETWORK, VARIANTS, compile_all
from moe_rt.gpucheck.steps import Check

ARCHS, MORE_ARCHS = ("sm_90a", "sm_120a"), ("sm_80", "sm_100a")
LIMIT_S = 240.0


def test_compile_only() -> None:
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


def test_more_architectures() -> None:
    """The text is the same on each; registers, and so spills, are not: long rows, the network's, and fp64."""
    require_compiler()
    some = tuple(v for v in VARIANTS if v == LARGEST or v.source == NETWORK or v.elem == "F64")
    assert {v.source for v in some} == {v.source for v in VARIANTS}
    check = Check(None, seconds=LIMIT_S)
    compile_all(MORE_ARCHS, some, check, cache=False)
    assert check.failures == []
    kernels, orders = check.tables
    assert {row[4] for row in kernels.rows} == {row[4] for row in orders.rows} == set(MORE_ARCHS)
