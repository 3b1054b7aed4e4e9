"""One CUDA device: its memory, its streams, and launching compiled kernels on them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.errors import InvalidConfig, LaunchFailed
from moe_rt.extras import how_to_install
from moe_rt.native.libraries import NVSHMEM, Library

_DRIVER_VERSION = 12000  # whose cuLaunchKernel this is, in cuda.h's way of counting
# From which on drivers capture launches that depend on each other, and GPUs have them.
_DEPENDENT_DRIVER, _DEPENDENT_ARCH = 12030, 90
_BULK_ARCH = 90  # GPUs from which on copy between global and shared memory by themselves
_DEPENDENT_OFF = "0"  # of MOE_RT_DEPENDENT_LAUNCHES
# Of each kernel: its name, and how many blocks.
Launches: TypeAlias = Sequence[tuple[str, int]]


class Kernels(Protocol):
    """Compiled kernels that can be launched by name."""

    def launch(
        self, launches: Launches, *, threads: int, shared_bytes: int, stream: int, params: ctypes.Array[Any]
    ) -> None:
        """Queues launches, in order; `params` holds the address of each argument, copied before this returns."""
        ...


class Gpu:
    """A CUDA device by its torch name. Everything here may be called on any thread.

    Raises:
        InvalidConfig: there is no such device.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise InvalidConfig(
                f"device: got {self.device}, expected a CUDA device that torch can use{why_there_is_none()}"
            )
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name, self.num_sms = properties.name, properties.multi_processor_count
        self.uuid = str(properties.uuid)
        # From 9.0 on the "a" target has the chip's own instructions; its code runs on that chip alone, as all ours.
        suffix = "a" if properties.major >= 9 else ""
        self.arch = f"sm_{properties.major}{properties.minor}{suffix}"
        # Shared memory that a block may have for bulk copies; torch's own stubs do not know of it.
        most = int(getattr(properties, "shared_memory_per_block_optin", 0))
        self.bulk_bytes = most if has_bulk_copies(self.arch) else 0
        self._pending: list[tuple[torch.cuda.Event, Tensor]] = []

    def zeros(self, num_bytes: int) -> Tensor:
        """Zero-filled bytes on the device."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, values: Tensor) -> Tensor:
        """A copy of a CPU tensor on the device, complete when this returns."""
        copy = values.to(self.device)
        self.synchronize()
        return copy

    def host_bytes(self, num_bytes: int) -> Tensor:
        """Zero-filled page-locked host memory; the device knows it by the same address."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def synchronize(self) -> None:
        """Waits for everything queued on the device: for making and tearing down, never on the way of an op."""
        torch.cuda.synchronize(self.device)

    def stream(self) -> int:
        """torch's current stream on this device and thread."""
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def is_capturing(self) -> bool:
        """True while the current stream is recorded into a graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def outlive_stream(self, memory: Tensor) -> None:
        """Keeps the memory from being reused before what is now queued on the current stream is done."""
        stream = torch.cuda.current_stream(self.device)
        if memory.is_cuda:
            memory.record_stream(stream)
            return
        # Page-locked memory goes back to its allocator with its last tensor, whatever a kernel may still write to it.
        self._pending = [(event, kept) for event, kept in self._pending if not event.query()]
        self._pending.append((stream.record_event(), memory))

    def kernels(
        self,
        source: str,
        defines: Mapping[str, str | int],
        *,
        library: Library | None = None,
        own_shared: Mapping[str, int] | None = None,
    ) -> Kernels:
        """Compiles cuda/device/<source> for this device, or takes it from the cache, and loads it.

        `library` is that of the network which the kernels call, if they call one.
        `own_shared` is the shared memory of a block of some kernels, by name, whatever a launch says.
        """
        from moe_rt.native.jit import compile_kernels  # not needed by CPU ranks

        binary = compile_kernels(source, self.arch, defines, library=library)
        return CudaModule(
            binary.cubin,
            list(binary.resources),
            self.device,
            nvshmem=library is NVSHMEM,
            dependent=waits_for_launches(self.arch),
            own_shared=own_shared or {},
        )


def why_there_is_none() -> str:
    """Why torch can use no GPU here, to be appended to a sentence; nothing where it can."""
    if torch.version.cuda is None:
        return f"; torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        variable = "" if hidden is None else f", with CUDA_VISIBLE_DEVICES={hidden!r}"
        return f"; torch says: {str(error).partition(' (Triggered')[0].splitlines()[0]}{variable}"
    return ""


def waits_for_launches(arch: str) -> bool:
    """Whether kernels for such a GPU wait by themselves for the launch before, and so may begin before it has ended."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= _DEPENDENT_ARCH


def has_bulk_copies(arch: str) -> bool:
    """Whether such a GPU copies between global and shared memory by itself, as rings need it."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= _BULK_ARCH


# How drivers say that they do not know such machine code.
_TOO_NEW = ("CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")


def _driver_too_old(error: str, driver: tuple[int, int], compiler: tuple[int, int]) -> str:
    known, made = (".".join(map(str, version)) for version in (driver, compiler))
    older = f"pip install 'nvidia-cuda-nvrtc{'' if driver >= (13, 0) else '-cu12'}=={known}.*'"
    if driver[0] < compiler[0]:  # any compiler of the driver's CUDA will do
        older = f"pip uninstall --yes nvshmem4py-cu13 && {how_to_install('cuda12')}"
    return (
        f"cuModuleLoadData: got {error} from a driver for CUDA {known}, expected one for {made}, as NVRTC is; "
        f"install a newer driver, or a compiler as old as this one: {older}"
    )


class CudaModule:
    """A loaded cubin. Modules stay loaded: kernels of a buffer may still be queued when the buffer is gone.

    Args:
        dependent: of what is launched together, all but the first may begin before the one before has ended: these
            kernels wait for its end by themselves. Where the driver cannot, or MOE_RT_DEPENDENT_LAUNCHES=0, none does.
        own_shared: as of Gpu.kernels.
    """

    def __init__(
        self,
        cubin: bytes,
        names: list[str],
        device: torch.device,
        *,
        nvshmem: bool,
        dependent: bool = False,
        own_shared: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        from cuda.bindings import driver  # not needed by CPU ranks

        self._driver, self._device = driver, device
        self._bound = threading.local()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes sure that the device's context exists and is current
            self._context = self._checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())
            module = self._loaded(cubin)
            functions = {
                name: self._checked("cuModuleGetFunction", driver.cuModuleGetFunction(module, name.encode()))
                for name in names
            }
            # Loading at the first launch may wait for the whole device, on which a peer's kernel may wait for us.
            for function in functions.values():
                self._checked("cuFuncLoad", driver.cuFuncLoad(function))
            for name, num_bytes in own_shared.items():
                self._allow_shared(functions[name], num_bytes)
            self._functions, self._own_shared = (
                {name: int(function) for name, function in functions.items()},
                own_shared,
            )
            # An op's launches are one call of C++, which knows the driver by this address alone.
            self._launch_kernel = self._address_of(b"cuLaunchKernel")
            self._launch_kernel_ex = self._address_of(b"cuLaunchKernelEx") if dependent and self._may_depend() else 0
            if nvshmem:
                from moe_rt.heap.nvshmem import register_module

                register_module(int(module))

    def _address_of(self, call: bytes) -> int:
        return int(self._checked("cuGetProcAddress", self._driver.cuGetProcAddress(call, _DRIVER_VERSION, 0)[:2]))

    def _allow_shared(self, function: Any, num_bytes: int) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked("cuFuncSetAttribute", self._driver.cuFuncSetAttribute(function, attribute, num_bytes))

    def _may_depend(self) -> bool:
        if os.environ.get("MOE_RT_DEPENDENT_LAUNCHES") == _DEPENDENT_OFF:
            return False
        return int(self._checked("cuDriverGetVersion", self._driver.cuDriverGetVersion())) >= _DEPENDENT_DRIVER

    def _loaded(self, cubin: bytes) -> Any:
        code, *module = self._driver.cuModuleLoadData(cubin)
        if code.name in _TOO_NEW:
            from moe_rt.native.nvrtc import nvrtc_version

            _, number = self._driver.cuDriverGetVersion()
            known, made = (number // 1000, number % 1000 // 10), nvrtc_version()
            if known < made:
                raise LaunchFailed(_driver_too_old(code.name, known, made))
        return self._checked("cuModuleLoadData", (code, *module))

    def launch(
        self, launches: Launches, *, threads: int, shared_bytes: int, stream: int, params: ctypes.Array[Any]
    ) -> None:
        """As Kernels.launch.

        Raises:
            LaunchFailed: naming the kernel and the driver's error; those before it are queued.
        """
        if torch._C._cuda_getDevice() != self._device.index:
            with torch.cuda.device(self._device):
                self._launch(launches, threads, shared_bytes, stream, params)
        else:
            self._launch(launches, threads, shared_bytes, stream, params)

    def _launch(
        self, launches: Launches, threads: int, shared_bytes: int, stream: int, params: ctypes.Array[Any]
    ) -> None:
        if not hasattr(self._bound, "context"):
            # A thread that torch has made, autograd's for one, may have a current device but no context yet.
            self._checked("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._context))
            self._bound.context = self._context
        grids = [(self._functions[name], blocks, self._own_shared.get(name, shared_bytes)) for name, blocks in launches]
        queued, code = _engine.launch(
            self._launch_kernel, self._launch_kernel_ex, grids, threads, stream, ctypes.addressof(params)
        )
        if code:
            self._checked(launches[queued][0], (self._driver.CUresult(code),))

    def _checked(self, what: str, result: tuple[Any, ...]) -> Any:
        code, *value = result
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise LaunchFailed(f"{what}: got {code.name} from the CUDA driver, expected success")
        return value[0] if value else None
