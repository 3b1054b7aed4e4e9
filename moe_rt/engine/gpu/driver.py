"""A CUDA device: its memory, its streams, and launches of compiled kernels on them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.engine.gpu.libraries import NVSHMEM, Library
from moe_rt.errors import InvalidConfig, LaunchFailed
from moe_rt.extras import how_to_install

_DRIVER_VERSION = 12000  # version of the cuLaunchKernel to look up, encoded as in cuda.h
# Oldest driver that captures dependent launches, and oldest GPUs that have them.
_DEPENDENT_DRIVER, _DEPENDENT_ARCH = 12030, 90
_BULK_ARCH = 90  # oldest GPUs with bulk copies between global and shared memory
_DEPENDENT_OFF = "0"  # value of MOE_RT_DEPENDENT_LAUNCHES
# Loaded code, which all buffers of this process share: loading takes milliseconds, and device memory for good.
modules: dict[tuple[Any, ...], CudaModule] = {}
_modules_lock = threading.Lock()
# The kernels to launch: each one's name and its number of blocks.
Launches: TypeAlias = Sequence[tuple[str, int]]


class Kernels(Protocol):
    """Compiled kernels that can be launched by name."""

    def launch(
        self, launches: Launches, *, threads: int, shared_bytes: int, stream: int, params: ctypes.Array[Any]
    ) -> None:
        """Queue launches, in order; `params` holds the address of each argument, copied before this returns."""
        ...


class Gpu:
    """A CUDA device by its torch name. Every method may be called on any thread.

    Raises:
        InvalidConfig: no such device exists.
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
        # The "a" targets, from 9.0 on, add the chip's own instructions. Their code runs on that chip only, like all
        # code here.
        suffix = "a" if properties.major >= 9 else ""
        self.arch = f"sm_{properties.major}{properties.minor}{suffix}"
        # Shared memory that a block may have for bulk copies; torch's type stubs do not list it.
        most = int(getattr(properties, "shared_memory_per_block_optin", 0))
        self.bulk_bytes = most if has_bulk_copies(self.arch) else 0
        self._pending: list[tuple[torch.cuda.Event, Tensor]] = []

    def zeros(self, num_bytes: int) -> Tensor:
        """Zero-filled bytes on the device."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, values: Tensor) -> Tensor:
        """Return a copy of a CPU tensor on the device, complete when this returns."""
        copy = values.to(self.device)
        self.synchronize()
        return copy

    def host_bytes(self, num_bytes: int) -> Tensor:
        """Return zero-filled page-locked host memory, which the device knows by the same address."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def synchronize(self) -> None:
        """Wait for everything queued on the device. Only setup and teardown do this, never an op."""
        torch.cuda.synchronize(self.device)

    def stream(self) -> int:
        """Return torch's current stream on this device and thread."""
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def current(self) -> Any:
        """Return the current stream as `follow` takes it."""
        return torch.cuda.current_stream(self.device)

    def follow(self, stream: Any, tensors: Sequence[Tensor]) -> None:
        """Let the current stream wait for what another one has queued, and use these tensors of its."""
        current = torch.cuda.current_stream(self.device)
        if stream == current:
            return
        current.wait_stream(stream)
        for t in tensors:
            t.record_stream(current)

    def is_capturing(self) -> bool:
        """True while the current stream is recorded into a graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def outlive_stream(self, memory: Tensor) -> None:
        """Keep the memory from being reused before the work now queued on the current stream is done."""
        stream = torch.cuda.current_stream(self.device)
        if memory.is_cuda:
            memory.record_stream(stream)
            return
        # Page-locked memory returns to its allocator with its last tensor, even if a kernel may still write to it.
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
        """Compile cuda/gpu/<source> for this device, or take it from the cache, and load it once for this process.

        `library` is the network library that the kernels call, if any.
        `own_shared` gives the shared memory of a block of some kernels, by name, instead of the launch's.
        """
        from moe_rt.engine.gpu.jit import compile_kernels  # not needed by CPU ranks

        binary = compile_kernels(source, self.arch, defines, library=library)
        load = partial(
            CudaModule,
            binary.cubin,
            list(binary.resources),
            self.device,
            nvshmem=library is NVSHMEM,
            dependent=may_depend(self.arch),
            own_shared=own_shared or {},
        )
        if library is not None:  # a module of a network library belongs to one initialisation of it
            return load()
        key = (binary.cubin, self.device, may_depend(self.arch), tuple((own_shared or {}).items()))
        with _modules_lock:
            if key not in modules:
                modules[key] = load()
            return modules[key]


def why_there_is_none() -> str:
    """Say why torch can use no GPU here, to be appended to a sentence; "" if it can."""
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
    """True if kernels for such a GPU wait for the previous launch by themselves, and may start before it ends."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= _DEPENDENT_ARCH


def may_depend(arch: str) -> bool:
    """True if kernels launched together may overlap on such a GPU; MOE_RT_DEPENDENT_LAUNCHES=0 forbids it."""
    return waits_for_launches(arch) and os.environ.get("MOE_RT_DEPENDENT_LAUNCHES") != _DEPENDENT_OFF


def has_bulk_copies(arch: str) -> bool:
    """True if such a GPU has the bulk copies between global and shared memory that rings need."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= _BULK_ARCH


# Errors of drivers that are too old for this machine code.
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
    """A loaded cubin. It stays loaded: kernels of a buffer may still be queued after the buffer is freed.

    Args:
        dependent: all but the first of the kernels launched together may start before the previous one ends; they wait
            for its end by themselves. Ignored if the driver cannot do it.
        own_shared: see Gpu.kernels.
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
            # Loading at the first launch may wait for the whole device, on which a peer's kernel may wait for this
            # rank.
            for function in functions.values():
                self._checked("cuFuncLoad", driver.cuFuncLoad(function))
            for name, num_bytes in own_shared.items():
                self._allow_shared(functions[name], num_bytes)
            self._functions, self._own_shared = (
                {name: int(function) for name, function in functions.items()},
                own_shared,
            )
            # An op's launches are one call of C++, which has only this address of the driver.
            self._launch_kernel = self._address_of(b"cuLaunchKernel")
            dependent = dependent and self._driver_knows_dependent()
            self._launch_kernel_ex = self._address_of(b"cuLaunchKernelEx") if dependent else 0
            if nvshmem:
                from moe_rt.memory.nvshmem import register_module

                register_module(int(module))

    def _address_of(self, call: bytes) -> int:
        return int(self._checked("cuGetProcAddress", self._driver.cuGetProcAddress(call, _DRIVER_VERSION, 0)[:2]))

    def _allow_shared(self, function: Any, num_bytes: int) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked("cuFuncSetAttribute", self._driver.cuFuncSetAttribute(function, attribute, num_bytes))

    def _driver_knows_dependent(self) -> bool:
        return int(self._checked("cuDriverGetVersion", self._driver.cuDriverGetVersion())) >= _DEPENDENT_DRIVER

    def _loaded(self, cubin: bytes) -> Any:
        code, *module = self._driver.cuModuleLoadData(cubin)
        if code.name in _TOO_NEW:
            from moe_rt.engine.gpu.nvrtc import nvrtc_version

            _, number = self._driver.cuDriverGetVersion()
            known, made = (number // 1000, number % 1000 // 10), nvrtc_version()
            if known < made:
                raise LaunchFailed(_driver_too_old(code.name, known, made))
        return self._checked("cuModuleLoadData", (code, *module))

    def launch(
        self, launches: Launches, *, threads: int, shared_bytes: int, stream: int, params: ctypes.Array[Any]
    ) -> None:
        """Queue launches; see Kernels.launch.

        Raises:
            LaunchFailed: names the kernel and the driver's error; earlier launches are queued.
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
            # A thread made by torch, such as autograd's, may have a current device but no context yet.
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
