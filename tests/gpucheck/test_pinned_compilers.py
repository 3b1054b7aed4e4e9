"""Kernels compile and link with every supported torch, using the compiler and the NVSHMEM that it pins."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device.jit_tools import require_compiler
from packaging.requirements import Requirement
from support.tool_environments import ROOT, python_of

from moe_rt.engine.gpu.launcher import RING_SOURCE
from moe_rt.extras import cuda_extra
from moe_rt.lab.check.compiling import GIN_VARIANTS, LARGEST, NODES, OVER_NETWORK, REHEARSED, VARIANTS, WHOLE, Variant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OLDEST, NEWEST = "torch-2.11", "torch-2.15"
CUDA_12 = ("12.6", "12.8")
ONE_ARCH, MORE_ARCHS = ("sm_90a",), ("sm_80", "sm_100a")
ONE_OF_OTHERS = tuple(
    v for v in VARIANTS if v.source in (*OVER_NETWORK, RING_SOURCE) or (v.source == WHOLE and not v.codec)
)
EACH_SOURCE = (LARGEST, *ONE_OF_OTHERS, *(v for v in VARIANTS if v.hidden == 0 and v.elem == "Bf16"))
# Everything that the protocol needs from a compiler, and from a linker.
FEWEST = tuple(v for v in EACH_SOURCE if v.source == NODES)
# Each dtype, each code of rows, and each source once: everything that the sources need from a compiler.
EACH_PART = tuple(v for v in VARIANTS if v == LARGEST or v.codec or v in ONE_OF_OTHERS or v.elem != "Bf16")
LIMIT_S = 1800.0  # limit for a compiler that hangs
COMPILE = """
import json, sys
from moe_rt.config.codec import Codec
from moe_rt.lab.check.compiling import Variant, compile_all
from moe_rt.lab.check.steps import Check
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM
from moe_rt.engine.gpu.nvrtc import find_toolkit

archs, variants, seconds = json.loads(sys.argv[1])
check = Check(None, seconds=seconds)
compile_all(tuple(archs), tuple(Variant(*v[:4], Codec(v[4])) for v in variants), check, cache=False)
compiled = sorted({tuple(row[:5]) for row in check.tables[0].rows}, key=str)
used = NCCL if "gin" in variants[0][0] else NVSHMEM
print(json.dumps([find_toolkit(used).identity, compiled, check.failures]))
"""
# Kernels over NCCL without linking: they compile, and call functions as NCCL declares them.
COMPILE_GIN = """
import sys
from pathlib import Path
from moe_rt.lab.check.compiling import GIN_VARIANTS
from moe_rt.engine.gpu.jit import compile_ptx
from moe_rt.engine.gpu.libraries import NCCL

compile_ptx("gin_check.cu", "sm_90a", {}, library=NCCL, root=Path(sys.argv[1]))
nodes = GIN_VARIANTS[-1]
print("ncclGinPut_v3" in compile_ptx(nodes.source, "sm_90a", nodes.defines(), library=NCCL))
"""


def pinned_python(name: str) -> Path:
    """Return the pinned environment's interpreter."""
    return python_of("toolkits", name, ROOT / f"constraints-cuda-{name}.txt", "tools/install_toolkits.py")


@pytest.mark.timeout(1.2 * LIMIT_S)
@pytest.mark.parametrize(
    ("name", "archs", "variants"),
    [
        pytest.param(OLDEST, ONE_ARCH, FEWEST, id="oldest"),
        pytest.param(OLDEST, ONE_ARCH, EACH_SOURCE, id="oldest-each-source", marks=pytest.mark.sweep),
        pytest.param(CUDA_12[0], ONE_ARCH, EACH_SOURCE, marks=pytest.mark.sweep, id="cuda12"),
        pytest.param(CUDA_12[0], ("sm_80",), EACH_PART, marks=pytest.mark.sweep, id="12.6-each-part"),
        pytest.param(CUDA_12[1], ("sm_90a", "sm_100a"), EACH_SOURCE, marks=pytest.mark.sweep, id="12.8"),
        pytest.param(OLDEST, ONE_ARCH, EACH_PART, marks=pytest.mark.sweep, id="oldest-each-part"),
        pytest.param(OLDEST, ONE_ARCH, VARIANTS, marks=pytest.mark.sweep, id="oldest-all-variants"),
        pytest.param(OLDEST, MORE_ARCHS, EACH_SOURCE, marks=pytest.mark.sweep, id="oldest-more-architectures"),
        pytest.param(NEWEST, ONE_ARCH, EACH_SOURCE, marks=pytest.mark.sweep, id="newest"),
        pytest.param(NEWEST, ("sm_90a", "sm_100a"), GIN_VARIANTS, marks=pytest.mark.sweep, id="newest-over-nccl"),
    ],
)
def test_pinned_compiler(name: str, archs: tuple[str, ...], variants: tuple[Variant, ...]) -> None:
    require_compiler()
    sources = {v.source for v in VARIANTS} - {REHEARSED}  # NODES has the same source
    assert variants in (FEWEST, GIN_VARIANTS) or {v.source for v in variants} >= sources
    job = json.dumps([archs, [[v.source, v.elem, v.hidden, v.topk, v.codec] for v in variants], LIMIT_S])
    command = [pinned_python(name), "-c", COMPILE, job]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    identity, compiled, failures = json.loads(result.stdout.splitlines()[-1])
    assert failures == []
    assert len(compiled) == sum(v.is_for(arch) for arch in archs for v in variants)
    pins = (ROOT / f"constraints-cuda-{name}.txt").read_text().splitlines()
    other = "nvidia-nvshmem" if variants == GIN_VARIANTS else "nvidia-nccl"
    packages = {pin.replace("==", " ") for pin in pins if pin.startswith("nvidia-") and not pin.startswith(other)}
    assert packages <= set(identity), "the pins are what compiled"


@pytest.mark.sweep
def test_kernels_over_nccl_compile(tmp_path: Path) -> None:
    require_compiler()
    shutil.copytree(ROOT / "cuda" / "protocol", tmp_path / "protocol")
    (tmp_path / "gpu").mkdir()
    for file in ("cuda/gpu/gin_prelude.h", "tests/device/gin_check.cu", "tests/device/gin_functions.h"):
        (tmp_path / "gpu" / Path(file).name).write_text((ROOT / file).read_text())
    command = [pinned_python(NEWEST), "-c", COMPILE_GIN, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"]


@pytest.mark.parametrize(("cuda", "extra"), [(None, "cuda"), ("12.6", "cuda12"), ("13.0", "cuda")])
def test_the_extra_that_is_asked_for_fits_torch(monkeypatch: pytest.MonkeyPatch, cuda: str | None, extra: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert cuda_extra() == extra


@pytest.mark.parametrize("name", CUDA_12)
def test_the_extra_for_cuda_12_brings_what_is_pinned(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {r.name: r for r in map(Requirement, project["optional-dependencies"]["cuda12"])}
    lines = (ROOT / f"constraints-cuda-{name}.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    required = {"nvidia-nvshmem-cu12"}  # required by nvshmem4py
    assert {pin.name for pin in pins} == extra.keys() - {"nvshmem4py-cu12"} | required
    for pin in pins:
        assert pin.name in required or str(pin.specifier).removeprefix("==") in extra[pin.name].specifier
