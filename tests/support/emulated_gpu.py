"""A GPU stand-in whose kernels run on host threads: the complete CUDA engine, including launches, on CPU tensors."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.cpp_programs import compile_program
from torch import Tensor

from moe_rt.config.codec import Codec
from moe_rt.engine.gpu.driver import Launches
from moe_rt.engine.gpu.launcher import RING_SOURCE
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM, Library

EMULATION = Path(__file__).resolve().parents[1] / "device"  # its C++ sources
ALIGNED = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-fno-sanitize-recover=alignment"]
GIN = "-DMOE_RT_EMULATED_GIN"  # selects the library; the C++ code ignores it
_SEGMENT, _SEGMENTS = 0, 4  # words of a launch's Links: the rank's segment, and the table of all segments
_CODECS = {codec.enumerator: codec for codec in Codec}


@functools.cache
def library(*defines: str) -> ctypes.CDLL:
    """Return the emulation. Ranks that are threads may call this concurrently and get the same library."""
    # Not optimised: most libraries run only a few rounds, and compilation takes half as long.
    constants = any("MOE_RT_HIDDEN" in define for define in defines)
    name = "emulation_gin.cpp" if GIN in defines else "emulation_constants.cpp" if constants else "emulation.cpp"
    loaded = ctypes.CDLL(str(compile_program(EMULATION / name, "-O0", "-shared", "-fPIC", *defines)))
    loaded.emulated_room.restype = ctypes.c_void_p
    return loaded


class EmulatedGpu:
    """Stand-in for moe_rt.engine.gpu.driver.Gpu. Launches run immediately, on the calling thread.

    Args:
        num_sms: number of blocks that run concurrently, over all launches.
        threads: lanes of a block, whatever the engine asks for; multiples of 32 have warps of 32 lanes.
        constants: sizes are compile-time constants, as in just-in-time compiled code, and rows are moved in the widest
            vectors that divide them; a misaligned vector ends the process.
        bulk_bytes: shared memory of a block for rings, which have space for 16 warps.
    """

    name, arch, uuid = "emulated", "none", "none"

    def __init__(self, num_sms: int = 12, threads: int = 3, constants: bool = False, bulk_bytes: int = 0) -> None:
        self.device, self.bulk_bytes = torch.device("cpu"), bulk_bytes
        self.num_sms, self.threads, self.constants = num_sms, threads, constants
        self.outlived: list[int] = []  # addresses of memory kept until the stream is done
        self._rooms: dict[str, int] = {}
        self._lock = threading.Lock()
        self.launched: list[str] = []
        self.network: list[str] = []  # defines that select the network's library, if launches use one
        self.has_network = False
        self.networks: dict[int, ctypes.Array[Any]] = {}  # a rank's segment -> table of all segments for the network

    def zeros(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, values: Tensor) -> Tensor:
        return values.clone()

    def host_bytes(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        pass

    def stream(self) -> int:
        return threading.get_ident()

    def current(self) -> None:
        pass

    def follow(self, stream: None, tensors: list[Tensor]) -> None:
        pass  # launches are complete

    def is_capturing(self) -> bool:
        return False

    def outlive_stream(self, memory: Tensor) -> None:
        self.outlived.append(memory.data_ptr())
        if self.has_network:
            library(*self.network).emulated_drain()

    def room(self, loaded: ctypes.CDLL) -> ctypes.c_void_p:
        with self._lock:  # shared by all ranks
            return ctypes.c_void_p(self._rooms.setdefault(loaded._name, loaded.emulated_room(self.num_sms)))

    def kernels(
        self,
        source: str,
        defines: Mapping[str, str | int],
        *,
        library: Library | None = None,
        own_shared: Mapping[str, int] | None = None,
    ) -> EmulatedKernels:
        return EmulatedKernels(self, source, defines, library, own_shared or {})


class EmulatedKernels:
    _seeds = itertools.count(1)

    def __init__(
        self,
        gpu: EmulatedGpu,
        source: str,
        defines: Mapping[str, str | int],
        linked: Library | None,
        own_shared: Mapping[str, int],
    ) -> None:
        self.gpu, self._own_shared = gpu, own_shared
        self.network = linked is NVSHMEM
        # Nodes that are only declared are also reached over it.
        self.rehearsed = source == "kernels_nodes_mapped.cu"  # its launches get the table of segments
        gpu.has_network = gpu.has_network or linked is not None or self.rehearsed
        self.elem = str(defines["MOE_RT_ELEM"]).encode()
        self.codecs = [_CODECS[str(defines.get(f"MOE_RT_{op}_CODEC", "kRaw"))] for op in ("DISPATCH", "COMBINE")]
        self.hidden, self.num_topk = int(defines["MOE_RT_HIDDEN"]), int(defines["MOE_RT_TOPK"])
        constants = [f"-D{name}={value}" for name, value in defines.items()]
        if linked is NCCL:  # fp32 and bf16 only
            gpu.network = [GIN]
        kind = ["-DMOE_RT_EMULATED_RING"] if source == RING_SOURCE else gpu.network
        self._library = library(*ALIGNED, *constants, *kind) if gpu.constants else library(*kind)

    def launch(
        self, launches: Launches, *, threads: int, shared_bytes: int, stream: int, params: ctypes.Array[Any]
    ) -> None:
        for name, blocks in launches:
            self._launch(name, blocks, self._own_shared.get(name, shared_bytes), params)

    def _launch(self, name: str, blocks: int, shared_bytes: int, params: ctypes.Array[Any]) -> None:
        self.gpu.launched.append(name)
        links = ctypes.cast(params[2], ctypes.POINTER(ctypes.c_uint64))
        segments: Any = None
        if self.rehearsed:
            segments = ctypes.c_void_p(links[_SEGMENTS])
        elif self.network:
            segments = self.gpu.networks[links[_SEGMENT]]
        known = self._library.emulated_launch(
            self.gpu.room(self._library),
            name.encode(),
            self.elem,
            self.hidden,
            self.num_topk,
            *self.codecs,
            blocks,
            self.gpu.threads,
            ctypes.c_int64(shared_bytes),
            params,
            segments,
            next(self._seeds),
        )
        assert known, f"no kernel is called {name}"
