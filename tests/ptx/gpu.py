"""A GPU that executes PTX: moe_rt's Gpu and launches, through cuda-python, down to the stand-in for the driver.

It needs a dedicated process (isolated.py): it permanently replaces the driver and the allocator of torch's CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ptx.modules import ARCH, image_of, ptx_of
from support.cpp_programs import compile_object, compile_program, link
from torch import Tensor

from moe_rt.config.options import BufferOptions
from moe_rt.engine.gpu import driver as gpu
from moe_rt.engine.gpu import jit
from moe_rt.memory import loopback

_HERE = Path(__file__).parent
_PARTS = ("device", "host", "lane", "places", "bulk", "network", "driver")
_FLAGS = ("-O2", "-shared", "-fPIC")

# PTX in, PTX out: a change that a test makes to the kernels before they run.
Edit = Callable[[str], str]


def set_default_tuning(**fields: Any) -> dict[str, Any]:
    """Change what buffers without a tuning have in this process, and return the fields as they were."""
    default = BufferOptions.tuning
    before = {name: getattr(default, name) for name in fields}
    for name, value in fields.items():
        object.__setattr__(default, name, value)
    return before


class PtxFault(RuntimeError):
    """A fault found while a kernel ran: the broken rule, the place, and the other access."""


def build() -> tuple[Path, Path]:
    """Build the stand-in for the driver, and torch's allocator in its memory."""
    objects = [compile_object(_HERE / f"{name}.cpp", *_FLAGS) for name in _PARTS]
    torch_files = Path(torch.__file__).parent
    paths = (f"-isystem{torch_files}/include", f"-L{torch_files}/lib", "-lc10", f'-DTORCH="{torch.__version__}"')
    driver = link(objects, *_FLAGS, "-Wl,-soname,libcuda.so.1")
    return driver, compile_program(_HERE / "allocator.cpp", *_FLAGS, *paths)


@functools.cache
def load() -> ctypes.CDLL:
    """Load the stand-in where cuda-python will find it; from now on torch's CPU tensors are in its memory."""
    driver, allocator = build()
    library = ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    library.ptx_report.restype = ctypes.c_char_p
    library.ptx_reached.restype = ctypes.c_char_p
    library.ptx_accesses.restype = ctypes.c_uint64
    library.ptx_facts.restype = ctypes.c_uint64
    library.ptx_early.restype = ctypes.c_uint32
    ctypes.CDLL(str(allocator)).ptx_take_over()
    return library


class PtxGpu(gpu.Gpu):
    """Device tensors are CPU tensors, and a launch is complete when it returns; other ranks' launches run meanwhile.

    Args:
        seed: seed of the order in which lanes run.
        num_sms: number of blocks that run concurrently, over all launches.
        edit: changes the PTX.
        real_time: the device's clock is the host's; otherwise it advances a nanosecond a turn, and tests advance it.
    """

    name, arch, uuid = "executed", ARCH, "none"
    bulk_bytes = 227 << 10
    segment_share = 1.0
    nodes: Sequence[int] | None = None  # nodes of its virtual ranks, if they are on several
    num_launches = 0  # all launches of this process

    def __init__(self, seed: int = 1, num_sms: int = 10, edit: Edit = lambda ptx: ptx, real_time: bool = False) -> None:
        self.device, self.num_sms, self._edit = torch.device("cpu"), num_sms, edit
        self._library = load()
        self._library.ptx_configure(ctypes.c_uint64(seed), num_sms, real_time)
        self._threads = threading.local()
        self.launched: list[str] = []
        torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
        torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]
        torch._C._cuda_getDevice = lambda: None
        jit.compile_kernels = self._compile  # type: ignore[assignment]
        loopback.allocate = self._allocate  # type: ignore[assignment]

    def host_bytes(self, num_bytes: int) -> Tensor:
        return self.zeros(num_bytes)

    def synchronize(self) -> None:
        self.drain()

    def stream(self) -> int:
        """Return this thread's stream."""
        if not hasattr(self._threads, "stream"):
            from cuda.bindings import driver  # finds the stand-in, which is loaded by now

            self._threads.stream = int(self._checked(driver.cuStreamCreate(0)))
        return int(self._threads.stream)

    def is_capturing(self) -> bool:
        from cuda.bindings import driver

        return bool(self._checked(driver.cuStreamIsCapturing(self.stream())))

    def current(self) -> None:
        pass

    def follow(self, stream: None, tensors: Sequence[Tensor]) -> None:
        pass  # launches are complete

    def outlive_stream(self, memory: Tensor) -> None:
        pass  # launches are complete

    def kernels(self, source: str, defines: Mapping[str, str | int], **how: Any) -> PtxKernels:
        gpu.modules.clear()  # each engine's code has marks of its own
        return PtxKernels(self, super().kernels(source, defines, **how))

    def drain(self) -> None:
        """Wait for this thread's stream.

        Raises:
            PtxFault: a kernel broke a rule.
        """
        from cuda.bindings import driver

        self._checked(driver.cuStreamSynchronize(self.stream()))

    @contextlib.contextmanager
    def graph(self) -> Iterator[Callable[[], None]]:
        """Capture this thread's launches. The yielded function runs all of them again and waits."""
        from cuda.bindings import driver

        stream, graphs = self.stream(), []

        def replay() -> None:
            self._checked(driver.cuGraphLaunch(graphs[0], stream))
            self.drain()

        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._checked(driver.cuStreamBeginCapture(stream, mode))
        yield replay
        graph = self._checked(driver.cuStreamEndCapture(stream))
        graphs.append(self._checked(driver.cuGraphInstantiate(graph, 0)))

    def wind(self, seconds: float) -> None:
        """Advance the device's clock."""
        self._library.ptx_wind(ctypes.c_int64(int(seconds * 1e9)))

    def accesses(self) -> int:
        """Number of accesses checked so far."""
        return int(self._library.ptx_accesses())

    def facts(self) -> int:
        """Number of facts in the largest clock."""
        return int(self._library.ptx_facts())

    def early(self) -> int:
        """Number of launches that began before their predecessor in the stream had ended."""
        return int(self._library.ptx_early())

    def fault(self) -> str:
        """Return the fault found, or ""."""
        return str(self._library.ptx_report().decode())

    def mute(self, entry: str, line: int) -> None:
        """Disable one barrier, or the order of one atomic access, in kernels that are loaded from now on."""
        self._library.ptx_mute(entry.encode(), line)

    def reached(self) -> set[tuple[str, int]]:
        """Return (entry, line of the entry) of the barriers and atomic accesses executed since the last call."""
        lines = (line.split() for line in self._library.ptx_reached().decode().splitlines())
        return {(name, int(line)) for name, line in lines}

    def _checked(self, result: tuple[Any, ...]) -> Any:
        code, *value = result
        if report := self.fault():
            raise PtxFault(report)
        assert int(code) == 0, code
        return value[0] if value else None

    def _compile(self, source: str, arch: str, defines: Mapping[str, str | int], **how: Any) -> jit.Binary:
        """Stand-in for jit.compile_kernels."""
        assert arch == ARCH
        image, names = image_of(self._edit(ptx_of(source, defines, nvshmem=how.get("library") is not None)))
        return jit.Binary(image, dict.fromkeys(names), True, 0.0)  # type: ignore[arg-type]

    def _allocate(self, rendezvous: Any, num_bytes: int, *rest: Any) -> Any:
        """Stand-in for loopback.allocate that leaves unowned gaps between the segments of a region."""
        segments = _allocate(rendezvous, num_bytes, *rest)
        begin = segments.addresses[rendezvous.rank]
        own = int(num_bytes * self.segment_share)
        assert self._library.ptx_narrow(ctypes.c_uint64(begin), ctypes.c_uint64(own))
        return segments


_allocate = loopback.allocate


class PtxKernels:
    """Loaded kernels; a call waits for the launches it makes."""

    def __init__(self, gpu: PtxGpu, kernels: Any) -> None:
        self._gpu, self._kernels = gpu, kernels

    def launch(self, launches: gpu.Launches, **how: Any) -> None:
        self._gpu.launched.extend(name for name, _ in launches)
        PtxGpu.num_launches += len(launches)
        self._kernels.launch(launches, **how)
        if not self._gpu.is_capturing():
            self._gpu.drain()
