"""Small PTX programs that do what the project's kernels never do or rarely show."""

from __future__ import annotations

import ctypes

import torch
from ptx.gpu import PtxGpu
from ptx.modules import image_of

from moe_rt.engine.gpu.driver import CudaModule

_HEAD = ".version 9.5\n.target sm_90a\n.address_size 64\n"


def program(body: str, shared_bytes: int = 0) -> str:
    """Return a kernel with one parameter, an address, which is in %rd1."""
    shared = f".shared .align 16 .b8 room[{shared_bytes}];" if shared_bytes else ""
    registers = "".join(f".reg .{kind} %{name}<40>;\n" for name, kind in _REGISTERS.items())
    return (
        f"{_HEAD}.visible .entry small(\n.param .u64 small_param_0\n)\n.maxntid 1024, 1, 1\n{{\n{registers}{shared}\n"
        f"ld.param.u64 %rd1, [small_param_0];\n{body}\nret;\n}}\n"
    )


_REGISTERS = {"p": "pred", "rs": "b16", "r": "b32", "f": "f32", "rd": "b64", "fd": "f64"}


def run(
    body: str,
    *,
    threads: int = 1,
    blocks: int = 1,
    shared_bytes: int = 0,
    num_bytes: int = 256,
    seed: int = 1,
    first: str | None = None,
    times: int = 1,
) -> list[int]:
    """Return the 64-bit words at %rd1 after a program; they start as zeros, or as the program `first` left them.

    The program is launched `times` times in a row, so all launches but the first may begin early.
    """
    gpu = PtxGpu(seed)
    out = gpu.zeros(num_bytes)
    address = ctypes.c_uint64(out.data_ptr())
    params = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    for text in ([] if first is None else [first]) + [body]:
        image, names = image_of(program(text, shared_bytes))
        module = CudaModule(image, names, gpu.device, nvshmem=False, dependent=True)
        module.launch([("small", blocks)] * times, threads=threads, shared_bytes=0, stream=gpu.stream(), params=params)
    gpu.drain()
    return [int(word) for word in out.view(torch.int64).tolist()]


def results(expressions: list[str]) -> list[int]:
    """Run instructions that each leave a result in %rd9, and return the results."""
    body = "\n".join(f"{text}\nst.global.b64 [%rd1+{8 * i}], %rd9;" for i, text in enumerate(expressions))
    return run(body, num_bytes=1024)


def launch_error(body: str, threads: int) -> str:
    """Return the driver's error for a launch that it refuses."""
    try:
        run(body, threads=threads)
    except RuntimeError as error:
        return str(error)
    return ""
