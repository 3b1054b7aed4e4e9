"""Loads a cubin and launches through moe_rt.engine.gpu.driver on the stub driver, which is on the library path."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from types import SimpleNamespace

import torch
from cuda.bindings import driver

from moe_rt.engine.gpu import jit
from moe_rt.engine.gpu.driver import CudaModule, Gpu, may_depend
from moe_rt.engine.gpu.libraries import NCCL
from moe_rt.errors import LaunchFailed

DEPENDENT = may_depend("sm_90a")


def launch_early(params: ctypes.Array[ctypes.c_void_p]) -> None:
    """Launch three kernels, two of which may begin early, and one through cuda-python, which uses cuda.h's structs."""
    module = CudaModule(
        b"\x7fELF and so on", ["ab", "cdef"], torch.device("cuda", 0), nvshmem=False, dependent=DEPENDENT
    )
    early = [("ab", 1), ("cdef", 2), ("ab", 3)]
    module.launch(early, threads=32, shared_bytes=7, stream=5, params=params)
    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs = 7, 5, [attribute], 1
    driver.cuLaunchKernelEx(config, driver.CUfunction(0x1004), ctypes.addressof(params), 0)


def share() -> None:
    """Print which kernels share one loaded module with the first ones."""
    gpu = Gpu.__new__(Gpu)  # there is no device
    gpu.device, gpu.arch = torch.device("cuda", 0), "sm_90a"
    jit.compile_kernels = lambda source, arch, defines, library: SimpleNamespace(  # type: ignore[assignment]
        cubin=b"\x7fELF" + source.encode(), resources={"abc": None}
    )
    first = gpu.kernels("a.cu", {})
    how = {"same": {}, "shared": {"own_shared": {"abc": 1}}, "network": {"library": NCCL}}
    found = {name: gpu.kernels("a.cu", {}, **given) is first for name, given in how.items()}
    gpu.device = torch.device("cuda", 1)
    found |= {"device": gpu.kernels("a.cu", {}) is first}
    gpu.device = torch.device("cuda", 0)
    print(found | {"source": gpu.kernels("b.cu", {}) is first, "again": gpu.kernels("a.cu", {}) is first})


def launch() -> None:
    module = CudaModule(b"\x7fELF and so on", ["abc", "defgh"], torch.device("cuda", 0), nvshmem=False)
    words = [ctypes.c_uint64(41), ctypes.c_uint64(42)]
    params = (ctypes.c_void_p * 2)(*(ctypes.addressof(w) for w in words))
    module.launch([("defgh", 7)], threads=64, shared_bytes=99, stream=5, params=params)
    words[1].value = 43
    module.launch([("abc", 1), ("defgh", 2)], threads=32, shared_bytes=0, stream=0, params=params)
    thread = threading.Thread(
        target=lambda: module.launch([("abc", 2)], threads=32, shared_bytes=0, stream=0, params=params)
    )
    thread.start()
    thread.join()
    try:
        module.launch([("defgh", 1), ("abc", 1000), ("defgh", 1)], threads=32, shared_bytes=0, stream=0, params=params)
    except LaunchFailed as error:
        print(error)
    launch_early(params)
    roomy = {"roomy": 200 << 10}
    module = CudaModule(
        b"\x7fELF", ["abc", "roomy"], torch.device("cuda", 0), nvshmem=False, dependent=DEPENDENT, own_shared=roomy
    )
    module.launch([("abc", 1), ("roomy", 2)], threads=32, shared_bytes=7, stream=5, params=params)
    try:
        CudaModule(b"not machine code", [], torch.device("cuda", 0), nvshmem=False)
    except LaunchFailed as error:
        print(error)


if __name__ == "__main__":
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]
    torch._C._cuda_getDevice = lambda: 0
    {"launch": launch, "share": share}[sys.argv[1]]()
