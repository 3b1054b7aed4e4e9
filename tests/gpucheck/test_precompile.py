"""`moe-rt compile` fills a cache with the very kernels that a buffer looks up."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from device.jit_tools import require_compiler

from moe_rt.cli import main
from moe_rt.config.codec import Codec
from moe_rt.engine.gpu.jit import compile_kernels
from moe_rt.engine.gpu.launcher import RING_SOURCE, kernel_defines
from moe_rt.lab.check import compiling
from moe_rt.lab.check.compiling import Variant
from moe_rt.lab.testing.rounds import make_spec


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compile", *arguments])


def test_a_buffer_finds_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.setenv("MOE_RT_CACHE", "replaced by the command")
    monkeypatch.setattr(compiling, "VARIANTS", (Variant("kernels.cu", "F32", 20, 3),))
    monkeypatch.setattr(compiling, "NEEDED", ())
    monkeypatch.setattr(compiling, "LARGEST", Variant("kernels.cu", "F32", 20, 3))
    assert call("--into", str(tmp_path / "earlier"), "--arch", "sm_90a").exit_code == 0
    result = call("--into", str(tmp_path / "kernels"), "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    assert "1 compiled sources in" in result.output
    assert "MOE_RT_CACHE=" in result.output
    assert stat.S_IMODE((tmp_path / "kernels").stat().st_mode) == 0o700
    spec = make_spec(2)
    monkeypatch.setenv("MOE_RT_CACHE", str(tmp_path / "kernels"))
    found = compile_kernels("kernels.cu", "sm_90a", kernel_defines(spec, spec.tuning.threads))
    assert found.from_cache


@pytest.mark.parametrize(("rows_as", "dtype"), [(None, None), ("fp8", torch.float8_e4m3fn)])
def test_variants_define_what_a_buffer_defines(rows_as: str | None, dtype: torch.dtype | None) -> None:
    """Each source with its own number of threads."""
    spec = make_spec(2, dtype=torch.bfloat16, hidden=64, dispatch_dtype=dtype, combine_dtype=dtype)
    variants = {v.source: v for v in compiling.variants_for("Bf16", 64, 3, rows_as)}
    assert variants.keys() >= {"kernels.cu", compiling.WHOLE, RING_SOURCE, *compiling.OVER_NETWORK, "activation.cu"}
    assert variants["kernels.cu"].codec is Codec.of(dtype)
    for source in ("kernels.cu", compiling.WHOLE, RING_SOURCE):
        assert variants[source].defines() == kernel_defines(spec, spec.tuning.threads)
    for source in compiling.OVER_NETWORK:
        assert variants[source].defines() == kernel_defines(spec, spec.tuning.network_threads)


def test_what_does_not_compile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.setenv("MOE_RT_CACHE", "replaced by the command")
    monkeypatch.setattr(compiling, "VARIANTS", (Variant("kernels.cu", "NoSuchElement", 20, 3),))
    monkeypatch.setattr(compiling, "NEEDED", ())
    result = call("--into", str(tmp_path), "--arch", "sm_90a")
    assert result.exit_code == 1
    assert "NoSuchElement" in result.output


@pytest.mark.parametrize("words", [[], ["--arch", "sm_90a"], ["--arch", "sm_90a", "--into", "x", "--hidden", "64"]])
def test_usage(words: list[str]) -> None:
    assert call(*words).exit_code == 2
