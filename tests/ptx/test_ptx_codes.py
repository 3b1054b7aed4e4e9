"""Compiled kernels encode and decode rows, four values at a time, to the same bits as the CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from device.jit_tools import require_compiler
from ptx.gpu import PtxGpu
from ptx.modules import ARCH, image_of, sources_with
from ptx.own_process import isolated
from support.cpp_programs import compile_program
from torch import Tensor

from moe_rt.engine.gpu.driver import CudaModule
from moe_rt.engine.gpu.jit import compile_ptx

HERE = Path(__file__).parent
LANES = 256


@pytest.fixture(scope="module")
def ptx() -> str:
    require_compiler()
    with sources_with({"codes.cu": (HERE / "codes.cu").read_text()}) as root:
        return compile_ptx("codes.cu", ARCH, {}, root=root)


def floats(fp8: bool) -> Tensor:
    """Return values that test the encoder: every code's value, the midpoint of two codes and its two neighbours, and
    one value of each magnitude."""
    most = 448.0 if fp8 else 127.0
    kind = torch.float8_e4m3fn if fp8 else torch.int8
    codes = torch.arange(128, dtype=torch.uint8).view(kind).float()
    codes = codes[codes.isfinite()]
    marks = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([most])])
    around = torch.cat([marks, marks.nextafter(torch.tensor(torch.inf)), marks.nextafter(torch.tensor(0.0))])
    sizes = (torch.arange(1 << 15, dtype=torch.int32) * 0x10000 + 0x7FFF).view(torch.float32)  # also subnormal
    numbers = torch.cat([around, sizes[sizes <= most]])
    numbers = torch.cat([numbers, -numbers])
    return torch.cat([numbers, torch.zeros(-len(numbers) % (4 * LANES))])


def of_cpu(name: str, inputs: Tensor, scales: Tensor, out: Tensor, fp8: bool) -> Tensor:
    library = ctypes.CDLL(str(compile_program(HERE / "codes.cpp", "-O1", "-shared", "-fPIC")))
    getattr(library, name)(*(ctypes.c_void_p(t.data_ptr()) for t in (inputs, scales, out)), inputs.numel(), int(fp8))
    return out


def run(ptx: str, name: str, fours: Tensor, fp8: bool) -> Tensor:
    """Run a kernel on `fours` [N, 6], the words of Four."""
    gpu = PtxGpu()
    memory = gpu.zeros(fours.nbytes).view(fours.dtype).view_as(fours).copy_(fours)
    image, names = image_of(ptx)
    module = CudaModule(image, names, gpu.device, nvshmem=False)
    arguments = (ctypes.c_uint64(memory.data_ptr()), ctypes.c_int32(fp8))
    params = (ctypes.c_void_p * 2)(*(ctypes.addressof(a) for a in arguments))
    blocks = len(fours) // LANES
    module.launch([(name, blocks)], threads=LANES, shared_bytes=0, stream=gpu.stream(), params=params)
    gpu.drain()
    return memory.clone()


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "int8"])
def test_numbers_become_the_same_codes(ptx: str, fp8: bool) -> None:
    x = floats(fp8).view(-1, 4)
    inverse = torch.ones(len(x))
    inverse[-1], x[-1] = 0.0, torch.tensor([torch.nan, torch.inf, -torch.inf, 3.0])  # a block that is not finite
    fours = torch.cat([x, inverse[:, None], torch.zeros(len(x), 1)], 1).view(torch.int32)
    got = isolated(run, ptx, "encode", fours, fp8)[:, 5].contiguous().view(torch.uint8)
    assert torch.equal(got, of_cpu("encode_codes", x.contiguous(), inverse, torch.empty_like(got), fp8))
    assert len(got.unique()) == (2 * 126 + 1 if fp8 else 255), "every code, and one zero"


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "int8"])
def test_codes_become_the_same_numbers(ptx: str, fp8: bool) -> None:
    """Every code decodes as on the CPU, including NaN codes; the last scales are of zero and non-finite blocks."""
    scales = torch.tensor([1.0, 0.3, 2.0**-107, 7.5e35, 3e-41, 0.0, torch.nan, 0.1]).repeat_interleave(64)
    codes = torch.arange(256, dtype=torch.uint8).repeat(8).contiguous()
    fours = torch.zeros(len(scales), 6)
    fours[:, 4] = scales
    fours = fours.view(torch.int32)
    fours[:, 5] = codes.view(torch.int32)
    got = isolated(run, ptx, "decode", fours, fp8)[:, :4].contiguous().view(torch.float32)
    expected = of_cpu("decode_codes", codes, scales, torch.empty_like(got), fp8)
    numbers = ~expected.isnan()
    assert torch.equal(got.isnan(), ~numbers)
    assert torch.equal(got.view(torch.int32)[numbers], expected.view(torch.int32)[numbers])
