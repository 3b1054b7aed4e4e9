"""Stand-ins for nccl.core: processes are threads here, and memory is the host's.

A `Core` is the module as one process sees it. Its collectives wait for every rank of the communicator. A collective
that only some ranks call, or with different arguments, is recorded in `Cluster.violations`; the real one would hang.
"""

from __future__ import annotations

import ctypes
import enum
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from heap.fake_nvshmem import GARBAGE, Fabric
from torch import Tensor

DEV_COMM_BYTES = 16


class WindowFlag(enum.IntFlag):
    COLL_SYMMETRIC = 1
    STRICT_ORDERING = 2


class NcclGinConnectionType(enum.IntEnum):
    NONE = 0
    FULL = 1
    RAIL = 2


class NcclError(Exception):
    pass


@dataclass
class NCCLDevCommRequirements:
    gin_connection_type: NcclGinConnectionType | None = None


class UniqueId:
    def __init__(self, _internal: bytes = bytes(128)) -> None:
        self._internal = _internal

    def __bytes__(self) -> bytes:
        return self._internal

    @classmethod
    def from_bytes(cls, b: bytes) -> UniqueId:
        assert len(b) == 128
        return cls(b)


class Buffer:
    """The parts of cuda.core.Buffer that are used."""

    def __init__(self, size: int) -> None:
        self.data = torch.full((size + 4096,), GARBAGE, dtype=torch.uint8)
        start = -self.data.data_ptr() % 4096
        self.bytes: Tensor = self.data[start : start + size].view(torch.int8)
        self.handle, self.size = self.bytes.data_ptr(), size
        self._own_uses = self._uses()

    def __dlpack__(self, **how: Any) -> Any:
        return self.bytes.__dlpack__(**how)

    def _uses(self) -> int:
        return int(torch._C._storage_Use_Count(self.bytes.untyped_storage()._cdata))

    def is_seen(self) -> bool:
        """True if a tensor over the memory exists."""
        return self._uses() > self._own_uses

    def __dlpack_device__(self) -> Any:
        return self.bytes.__dlpack_device__()


def plain_dev_comm(rank: int, num_ranks: int) -> Any:
    return ctypes.create_string_buffer(bytes([rank, num_ranks]) * 8, DEV_COMM_BYTES)


def plain_window(begins: list[int]) -> int:
    return begins[0] + 1


class Cluster:
    """State that all processes share. `calls` has (process, name, argument) in order.

    Args:
        dev_comm: makes the memory image of a device communicator, from a rank and the number of ranks.
        window: makes a window handle, from the address of each rank's memory.
    """

    def __init__(
        self,
        size: int,
        *,
        patience_s: float = 60.0,
        dev_comm: Callable[[int, int], Any] = plain_dev_comm,
        window: Callable[[list[int]], int] = plain_window,
    ) -> None:
        self.patience_s, self.dev_comm, self.window = patience_s, dev_comm, window
        self.fabrics: dict[bytes, Fabric] = {}
        self.calls: list[tuple[int, str, Any]] = []
        self.violations: list[str] = []
        self.marks: list[list[int]] = []  # in segments that tests have seen allocated
        self.lock = threading.Lock()
        self.network = NcclGinConnectionType.FULL
        self.cores = [Core(self, process) for process in range(size)]

    def of(self, name: str) -> list[tuple[int, Any]]:
        return [(process, argument) for process, call, argument in self.calls if call == name]


class Core:
    """nccl.core in one process. `fail` names calls that fail here, `unmapped` ranks without a mapping."""

    UniqueId, WindowFlag, NcclGinConnectionType = UniqueId, WindowFlag, NcclGinConnectionType
    NCCLDevCommRequirements = NCCLDevCommRequirements

    def __init__(self, cluster: Cluster, process: int) -> None:
        self.cluster, self.process = cluster, process
        self.fail: set[str] = set()
        self.unmapped: set[int] = set()
        self.live: list[int] = []  # addresses of live buffers
        self.Communicator = SimpleNamespace(init=self._init)

    def load(self, device: torch.device) -> Core:
        """Replaces the import in World."""
        self.note("load", str(device))
        return self

    def note(self, name: str, argument: object = None) -> None:
        with self.cluster.lock:
            self.cluster.calls.append((self.process, name, argument))
        if name in self.fail:
            raise NcclError(f"{name} fails in process {self.process}")

    def get_unique_id(self, empty: bool = False) -> UniqueId:
        self.note("get_unique_id")
        return UniqueId(secrets.token_bytes(128))

    def mem_alloc(self, size: int, device: object = None) -> Buffer:
        self.note("mem_alloc", size)
        buffer = Buffer(size)
        self.live.append(buffer.handle)
        return buffer

    def mem_free(self, buf: Buffer) -> None:
        self.note("mem_free", buf.size)
        if buf.is_seen():
            self.cluster.violations.append("memory was freed while a tensor over it existed")
        self.live.remove(buf.handle)

    def _init(self, nranks: int, rank: int, unique_id: UniqueId, config: object = None) -> Communicator:
        with self.cluster.lock:
            fabric = self.cluster.fabrics.setdefault(bytes(unique_id), Fabric(nranks, self.cluster))  # type: ignore[arg-type]
        fabric.meet(rank, "init", nranks)
        self.note("init", (rank, nranks))
        return Communicator(self, fabric, rank)


class Communicator:
    def __init__(self, core: Core, fabric: Fabric, rank: int) -> None:
        self.core, self.fabric, self.rank = core, fabric, rank
        self.properties = SimpleNamespace(
            gin_connection_type=core.cluster.network, dev_comm_runtime_version_size=DEV_COMM_BYTES
        )

    def register_window(self, buffer: Buffer, flags: WindowFlag | None = None) -> Any:
        assert flags == WindowFlag.COLL_SYMMETRIC | WindowFlag.STRICT_ORDERING
        self.core.note("register_window", buffer.size)
        self.fabric.meet(self.rank, "register_window", buffer.size)
        begins = self._gather(buffer.handle)

        def get_peer_device_pointer(peer: int, offset: int = 0) -> int | None:
            return None if peer in self.core.unmapped else begins[peer] + offset

        handle = 0 if "window" in self.core.fail else self.core.cluster.window(begins)
        return SimpleNamespace(handle=handle, get_peer_device_pointer=get_peer_device_pointer)

    def create_dev_comm(self, requirements: NCCLDevCommRequirements | None = None) -> Any:
        assert requirements == NCCLDevCommRequirements(NcclGinConnectionType.FULL)
        self.core.note("create_dev_comm")
        self.fabric.meet(self.rank, "create_dev_comm")
        made = self.core.cluster.dev_comm(self.rank, self.fabric.size)
        return SimpleNamespace(ptr=ctypes.addressof(made), made=made)

    def destroy(self) -> None:
        self.core.note("destroy")
        self.fabric.meet(self.rank, "destroy")

    def _gather(self, value: int) -> list[int]:
        with self.core.cluster.lock:
            gathered = self.fabric.__dict__.setdefault("gathered", {})
            gathered[self.rank] = value
        self.fabric.barrier.wait(self.core.cluster.patience_s)
        values = [gathered[rank] for rank in range(self.fabric.size)]
        self.fabric.barrier.wait(self.core.cluster.patience_s)
        return values
