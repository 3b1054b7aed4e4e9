"""Lanes of a block on compiled kernels: prefix sums by shuffles, and values that the lanes of a group divide."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from device.jit_tools import require_compiler
from ptx.gpu import PtxGpu
from ptx.modules import ARCH, image_of, sources_with
from ptx.own_process import isolated
from torch import Tensor

from moe_rt.engine.gpu.driver import CudaModule
from moe_rt.engine.gpu.jit import compile_ptx

HERE = Path(__file__).parent
LANES, BOUND = 128, 40  # kBound in lanes.cu
SIZES = (0, 1, 2, 31, 32, 33, 96, 127, 128, 129, 256, 257, 1000)


@pytest.fixture(scope="module")
def ptx() -> str:
    require_compiler()
    with sources_with({"lanes.cu": (HERE / "lanes.cu").read_text()}) as root:
        return compile_ptx("lanes.cu", ARCH, {"MOE_RT_THREADS": LANES}, root=root)


def run(ptx: str, name: str, arrays: list[Tensor], *numbers: int) -> list[Tensor]:
    """Run a kernel of one block on int32 arrays and numbers; return the arrays after it."""
    gpu = PtxGpu()
    memory = [gpu.zeros(max(4, t.nbytes)).view(torch.int32)[: len(t)].copy_(t) for t in arrays]
    image, names = image_of(ptx)
    module = CudaModule(image, names, gpu.device, nvshmem=False)
    arguments = [*(ctypes.c_uint64(t.data_ptr()) for t in memory), *(ctypes.c_int32(n) for n in numbers)]
    params = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    module.launch([(name, 1)], threads=LANES, shared_bytes=0, stream=gpu.stream(), params=params)
    gpu.drain()
    return [t.clone() for t in memory]


def scanned(ptx: str) -> list[list[int]]:
    found = []
    for n in SIZES:
        values = torch.randint(100, (n + 1,), dtype=torch.int32, generator=torch.Generator().manual_seed(n))
        found.append(run(ptx, "scan", [values, torch.zeros(max(1, n), dtype=torch.int32)], n)[0].tolist())
    return found


def test_prefix_sums(ptx: str) -> None:
    """Each entry becomes the sum of the entries before it, for fewer and for more entries than lanes."""
    expected = []
    for n in SIZES:
        values = torch.randint(100, (n + 1,), dtype=torch.int32, generator=torch.Generator().manual_seed(n))[:n]
        expected.append([0, *values.cumsum(0).tolist()])
    assert isolated(scanned, ptx) == expected


def test_every_lane_has_all_values(ptx: str) -> None:
    """One lane of a group may write each value, for any number of warps that share the item."""
    cases = [(n, together) for n in (0, 1, 8, 32, 33, BOUND) for together in (1, 2, 4)]
    for (n, together), (values, writes) in zip(cases, isolated(collected, ptx, cases), strict=True):
        group = 32 * together
        assert values == [[100 * (lane // group) + i for i in range(n)] for lane in range(LANES)]
        assert writes == [[1] * n + [0] * (BOUND - n)] * (LANES // group)


def collected(ptx: str, cases: list[tuple[int, int]]) -> list[tuple[list[list[int]], list[list[int]]]]:
    found = []
    for n, together in cases:
        groups = LANES // (32 * together)
        arrays = [torch.zeros(k * BOUND, dtype=torch.int32) for k in (LANES, groups)]
        values, writes = run(ptx, "collect_values", arrays, n, together)
        found.append((values.view(LANES, BOUND)[:, :n].tolist(), writes.view(groups, BOUND).tolist()))
    return found
