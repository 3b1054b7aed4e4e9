"""Kernels of every source and code of rows compile and link without spills, in a sweep.

It compiles every kernel for four architectures, by the command of docs/cuda.md; continuous integration uses one.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from device.jit_tools import require_compiler

from moe_rt.cli import main
from moe_rt.lab.check.compiling import LARGEST, OVER_NETWORK, VARIANTS, Variant, compile_all
from moe_rt.lab.check.steps import Check

LIMIT_S = 1800.0  # limit for a compiler that hangs


@pytest.mark.sweep
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("archs", [("sm_90a",), ("sm_80", "sm_100a", "sm_120a")], ids="-".join)
def test_compile_only(archs: tuple[str, ...]) -> None:
    require_compiler()
    result = CliRunner().invoke(main, ["gpucheck", "--compile-only", *(a for arch in archs for a in ("--arch", arch))])
    (step,) = json.loads(result.output.splitlines()[-1])["steps"]
    assert result.exit_code == 0, step.get("error", step["detail"])
    kernels, _, orders = step["tables"]
    compiled = {(row[0], row[1], row[2], row[3], row[4]) for row in kernels["rows"]}
    assert len(compiled) == sum(v.is_for(arch) for arch in archs for v in VARIANTS)
    assert {row[4] for row in orders["rows"]} == set(archs)


LONG = tuple(v for v in VARIANTS if v == LARGEST or v.source in OVER_NETWORK)
F64 = tuple(v for v in VARIANTS if v.elem == "F64")
CODED = tuple(v for v in VARIANTS if v.codec)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("archs", "some"),
    [
        pytest.param(("sm_90a",), (LARGEST,), id="sm_90a", marks=pytest.mark.sweep),
        pytest.param(("sm_90a",), LONG + CODED, id="sm_90a-coded", marks=pytest.mark.sweep),
        pytest.param(("sm_80", "sm_100a", "sm_120a"), LONG + F64, id="more", marks=pytest.mark.sweep),
    ],
)
def test_long_rows(archs: tuple[str, ...], some: tuple[Variant, ...]) -> None:
    """Long rows do not spill on any architecture; the source is the same on each, registers are not."""
    require_compiler()
    check = Check(None, seconds=LIMIT_S)
    compile_all(archs, some, check, cache=False)
    assert check.failures == []
    kernels, _, orders = check.tables
    assert {row[4] for row in kernels.rows} == {row[4] for row in orders.rows} == set(archs)
