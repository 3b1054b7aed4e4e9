"""Stand-ins for nvshmem.core, a cuda.core Device and a GPU: processes are threads here, and memory is the host's.

A `Core` is the module nvshmem.core as one process sees it. Its collectives wait for every PE of the world. A collective
that only some PEs call, or with different arguments, is recorded in `Cluster.violations`; the real one would hang.
So is a call on a thread whose current device is not NVSHMEM's.
"""

from __future__ import annotations

import ctypes
import enum
import os
import secrets
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PAGE = 4096
HEAP_BYTES = 1 << 20
GARBAGE = 0xAB
NEED_A_DEVICE = ("init", "buffer", "free", "get_peer_buffer", "quiet", "module_init", "module_finalize")


class HostGpu:
    """A DeviceMemory on the host; `room` limits its allocations."""

    def __init__(self, room: int = HEAP_BYTES, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.room = room
        self.uuid = secrets.token_hex(8)
        self.syncs = 0

    def zeros(self, num_bytes: int) -> Tensor:
        if num_bytes > self.room:
            raise torch.OutOfMemoryError(f"got {num_bytes} bytes, expected at most {self.room}")
        region = torch.zeros(num_bytes + PAGE, dtype=torch.uint8)
        return region[-region.data_ptr() % PAGE :][:num_bytes]

    def synchronize(self) -> None:
        self.syncs += 1


class InitStatus(enum.IntEnum):
    STATUS_NOT_INITIALIZED = 0
    STATUS_IS_BOOTSTRAPPED = 1
    STATUS_IS_INITIALIZED = 2
    STATUS_LIMITED_MPG = 3
    STATUS_FULL_MPG = 4
    STATUS_INVALID = 32767


class InternalInitStatus(enum.IntEnum):
    UNINITIALIZED = 0
    INITIALIZED = 1
    DE_INITIALIZED = 2


class NvshmemInvalid(Exception):
    pass


class NvshmemError(Exception):
    pass


class NvshmemKernelObject:
    handle: int
    finalize_handle: int

    @staticmethod
    def from_handle(handle=None) -> NvshmemKernelObject:
        kernel = NvshmemKernelObject()
        kernel.handle = int(handle)
        return kernel


class UniqueID:
    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(128)
        self.ptr = ctypes.addressof(self.data)


class Buffer:
    """The parts of cuda.core.Buffer that are used."""

    def __init__(self, handle: int, size: int) -> None:
        self.handle, self.size = handle, size
        self.fails = False

    def fill(self, value: int, *, stream: object) -> None:
        assert stream == "default stream"
        if self.fails:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        ctypes.memset(self.handle, value, self.size)


class Fabric:
    """One world: its PEs' heaps and their barrier."""

    def __init__(self, size: int, cluster: Cluster) -> None:
        self.size, self.cluster = size, cluster
        self.barrier = threading.Barrier(size)
        self.board: list[object] = [None] * size
        self.cores: list[Core | None] = [None] * size

    def meet(self, pe: int, *what: object) -> None:
        self.board[pe] = what
        try:
            self.barrier.wait(self.cluster.patience_s)
            met = list(self.board)
            self.barrier.wait(self.cluster.patience_s)
        except threading.BrokenBarrierError:
            self.cluster.violations.append(f"PE {pe} waits in {what} for peers that do not come")
            raise
        if len(set(met)) > 1:
            self.cluster.violations.append(f"PEs met in different calls: {met}")


class Cluster:
    """State that all processes share. `calls` has (process, name, argument) in order."""

    def __init__(self, size: int, patience_s: float = 60.0) -> None:
        self.patience_s = patience_s
        self.fabrics: dict[bytes, Fabric] = {}
        self.calls: list[tuple[int, str, Any]] = []
        self.violations: list[str] = []
        self.lock = threading.Lock()
        self.cores = [Core(self, process) for process in range(size)]

    def of(self, name: str) -> list[tuple[int, Any]]:
        return [(process, argument) for process, call, argument in self.calls if call == name]

    def initialise(self, processes: list[int]) -> None:
        """Make a world before moe_rt does, as a program may: PEs are numbered in the given order."""
        fabric = Fabric(len(processes), self)
        for pe, process in enumerate(processes):
            self.cores[process]._enter(fabric, pe)


class Core:
    """nvshmem.core in one process. `fail` names calls that fail here, `unmapped` PEs without a mapping."""

    InitStatus, NvshmemKernelObject, UniqueID = InitStatus, NvshmemKernelObject, UniqueID
    NvshmemError, NvshmemInvalid = NvshmemError, NvshmemInvalid

    def __init__(self, cluster: Cluster, process: int) -> None:
        self.cluster, self.process = cluster, process
        self.fail: set[str] = set()
        self.unmapped: set[int] = set()
        self.shift = 0  # moves this process's heap to an address that differs from the others'
        self.buffers: list[Buffer] = []
        self.freed: list[int] = []
        self._internal_tracking = SimpleNamespace(
            _is_initialized={"status": InternalInitStatus.UNINITIALIZED}, InternalInitStatus=InternalInitStatus
        )
        self.status = InitStatus.STATUS_NOT_INITIALIZED
        self.fabric: Fabric | None = None
        self.bound = threading.local()  # threads on which the device is current

    def load(self, device: torch.device) -> tuple[Any, Any]:
        """Replaces the import in World."""
        self.note("load", str(device))
        self.settings = {"load": dict(os.environ)}
        return self, SimpleNamespace(
            set_current=lambda: setattr(self.bound, "device", device), default_stream="default stream"
        )

    def note(self, name: str, argument: object = None) -> None:
        with self.cluster.lock:
            self.cluster.calls.append((self.process, name, argument))
        if name in NEED_A_DEVICE and not hasattr(self.bound, "device"):
            self.cluster.violations.append(f"{name} on a thread without a current device")
        if name in self.fail:
            raise NvshmemError(f"{name} fails in process {self.process}")

    def _enter(self, fabric: Fabric, pe: int) -> None:
        self.fabric, self.pe = fabric, pe
        self.heap = torch.zeros(HEAP_BYTES + 2 * PAGE, dtype=torch.uint8)
        self.base = self.heap.data_ptr() + -self.heap.data_ptr() % PAGE + self.shift
        self.top = 512  # NVSHMEM does not promise page alignment
        fabric.cores[pe] = self
        self.status = InitStatus.STATUS_IS_INITIALIZED
        self._internal_tracking._is_initialized["status"] = InternalInitStatus.INITIALIZED

    def get_unique_id(self, empty=False) -> UniqueID:
        uid = UniqueID()
        if not empty:
            self.note("get_unique_id")
            uid.data.raw = secrets.token_bytes(128)
        return uid

    def init(self, device=None, uid=None, rank=None, nranks=None, mpi_comm=None, initializer_method="") -> None:
        assert device is not None
        self.settings["init"] = dict(os.environ)
        assert (mpi_comm, initializer_method) == (None, "uid")
        key = ctypes.string_at(uid.ptr, 128)
        with self.cluster.lock:
            fabric = self.cluster.fabrics.setdefault(key, Fabric(nranks, self.cluster))
        fabric.meet(rank, "init", nranks)
        self.note("init", (rank, nranks))
        self._enter(fabric, rank)

    def finalize(self) -> None:
        assert self.fabric
        self.note("finalize")
        self.fabric.meet(self.pe, "finalize")
        self.status, self.fabric = InitStatus.STATUS_NOT_INITIALIZED, None
        self._internal_tracking._is_initialized["status"] = InternalInitStatus.DE_INITIALIZED

    def buffer(self, size, release=False, except_on_del=True) -> Buffer:
        assert self.fabric
        assert not except_on_del, "a buffer that is garbage at the end of the interpreter would raise"
        self.fabric.meet(self.pe, "buffer", size)
        self.note("buffer", size)
        if self.top + size > HEAP_BYTES:
            raise NvshmemError(f"Failed to allocate memory of bytes {size}")
        buffer = Buffer(self.base + self.top, size)
        ctypes.memset(buffer.handle, GARBAGE, size)
        self.top += size + -size % 512
        buffer.fails = "fill" in self.fail
        self.buffers.append(buffer)
        return buffer

    def free(self, buffer: Buffer) -> None:
        assert self.fabric
        offset = buffer.handle - self.base
        self.note("free", offset)
        self.fabric.meet(self.pe, "free", offset)
        self.freed.append(offset)

    def get_peer_buffer(self, buffer: Buffer, pe: int):
        assert self.fabric
        self.note("get_peer_buffer", pe)
        assert pe != self.pe, "the real one counts a second owner of the own buffer"
        peer = self.fabric.cores[pe]
        if pe in self.unmapped or peer is None:
            raise NvshmemError("Failed to retrieve peer buffer")
        return Buffer(peer.base + buffer.handle - self.base, buffer.size)

    def quiet(self, stream=None) -> None:
        assert stream == "default stream"
        self.note("quiet")

    def module_init(self, mod: NvshmemKernelObject) -> None:
        self.note("module_init", mod.handle)
        print("CUmodule init status: 0")  # the real one also prints this

    def module_finalize(self, mod: NvshmemKernelObject) -> None:
        self.note("module_finalize", mod.finalize_handle)

    def get_version(self) -> str:
        return "stand-in"

    def init_status(self) -> InitStatus:
        return self.status

    def my_pe(self) -> int:
        return self.pe

    def n_pes(self) -> int:
        assert self.fabric
        return self.fabric.size
