"""Heap for ranks that are processes with a GPU each: NCCL windows over NVLink, or over GIN, its GPU-initiated network.

Four properties of NCCL shape this file:

* A communicator connects the ranks of one group. Each group gets its own with its first buffer.
* Collectives have no time limit, and a rank that fails inside one may block its peers. So ranks first confirm through
  the rendezvous that all can continue, and report local failures before any rank waits.
* Registering is collective, but a rank closes its buffer independently, when its garbage collector runs. So a released
  segment is kept, and handed out again once every rank has released it. `shutdown` frees segments, collectively.
* A rank cannot wait until its puts have arrived. But when a buffer is closed, each peer writes marks after everything
  else: once all marks are present, nothing more arrives in the segment. A segment without them is never used again: a
  rank of its group was killed, or could not make its engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from moe_rt.errors import InvalidConfig, OutOfSharedMemory
from moe_rt.group.all_or_none import all_or_none
from moe_rt.group.rendezvous import Rendezvous
from moe_rt.memory.nvshmem_start import host, require_own_gpus
from moe_rt.memory.segments import PAGE, DeviceMemory, GinWindow, Segments, free_bytes, round_up

SINCE = (2, 32)  # oldest NCCL whose functions for strong signals can be linked
_WORD = 8  # bytes of a mark


def load(device: torch.device) -> Any:
    """Import and return nccl.core. Only this heap needs it.

    Raises:
        InvalidConfig: the package is missing, or its library is too old; the message says what to install.
    """
    if device.type != "cuda":
        raise InvalidConfig(f'heap "gin": got memory on {device}, expected a CUDA device')
    major = (torch.version.cuda or "13").partition(".")[0]
    install = f"pip install --no-deps 'nvidia-nccl-cu{major}>={SINCE[0]}.{SINCE[1]}' && pip install nccl4py"
    try:
        import nccl.core as core

        found = core.get_version().libnccl
    except Exception as error:  # it loads libraries that may be missing
        raise InvalidConfig(
            f'heap "gin": got {type(error).__name__}: {error}; expected NCCL\'s package; {install}'
        ) from error
    if found is None or found.version.release < SINCE:
        got = "no library of NCCL" if found is None else f"NCCL {found.version}, {found.path}"
        raise InvalidConfig(f'heap "gin": got {got}, expected {SINCE[0]}.{SINCE[1]} or newer; {install}')
    return core


@dataclass
class _Allocation:
    buffer: Any  # cuda.core.Buffer
    window: Any = None
    data: Tensor | None = None  # the bytes of the buffer
    addresses: list[int] = field(default_factory=list)  # each rank's segment; 0 if it is not mapped
    num_bytes: int = 0  # stays 0 if a rank failed: then no rank uses it
    idle: bool = True
    marks: list[int] = field(default_factory=list)  # offsets of the marks that its last user's peers write


@dataclass
class _Connected:
    """A connected group of ranks."""

    comm: Any
    device_comm: Tensor | None = None  # in the GPU's memory; None if NCCL has no network
    allocations: dict[int, _Allocation] = field(default_factory=dict)  # by attempt number, the same on all ranks
    num_attempts: int = 0


class World:
    """NCCL in one process: the groups that it connects, and their memory. `load` returns nccl.core."""

    def __init__(self, load: Callable[[torch.device], Any] = load) -> None:
        self._load = load
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"  # pids repeat among containers
        self._core: Any = None
        self._groups: dict[tuple[str, ...], _Connected] = {}  # by the names of all ranks, in rank order

    def allocate(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory) -> Segments:
        """Connect the group if necessary and give every rank a segment. Collective: all ranks succeed or all raise.

        `timeout_s` limits the wait for ranks that do not arrive, not NCCL's own collectives.

        Raises:
            OutOfSharedMemory: some rank has no memory for its segment.
            InvalidConfig: NCCL cannot be used on some rank, or reaches a rank neither by NVLink nor over GIN.
            PeerTimeout: a rank did not arrive.
        """
        group = self._join(rendezvous, num_bytes, timeout_s, gpu)
        settled = all_or_none(rendezvous, lambda: self._settle(group, gpu), "finish its work on the GPU", timeout_s)
        idle = set.intersection(*({(size, number) for size, number in r["idle"]} for r in settled))
        fitting = [number for size, number in sorted(idle) if size >= num_bytes]
        if not fitting:
            group.num_attempts = max(r["attempts"] for r in settled)  # a rank may have left one before it counted
        number = fitting[0] if fitting else self._extend(group, rendezvous, num_bytes, timeout_s, gpu)
        allocation = group.allocations[number]
        all_or_none(rendezvous, lambda: self._zero(allocation, gpu), "zero its segment", timeout_s)
        allocation.idle, allocation.marks = False, []
        own, communicator = allocation.addresses[rendezvous.rank], group.device_comm

        def let_go() -> None:
            allocation.idle = True

        return Segments(
            list(allocation.addresses),
            [None] * rendezvous.size,
            [],
            symmetric=own,
            gin=GinWindow(0 if communicator is None else communicator.data_ptr(), allocation.window.handle),
            marks=allocation.marks,
            on_release=let_go,
        )

    def mapped(self, rendezvous: Rendezvous, timeout_s: float, gpu: DeviceMemory) -> list[bool]:
        """Return whose memory this rank maps; the network reaches others. Collective; raises like `allocate`."""
        segments = self.allocate(rendezvous, PAGE, timeout_s, gpu)
        mapped = [address != 0 for address in segments.addresses]
        segments.release()
        return mapped

    def shutdown(self, rendezvous: Rendezvous, timeout_s: float, gpu: DeviceMemory) -> None:
        """Free all segments of the group and end its communicator. Collective.

        Raises:
            InvalidConfig: a buffer is still open on some rank.
        """

        def look() -> dict[str, Any]:
            gpu.synchronize()
            return {"name": self._name}

        records = all_or_none(rendezvous, look, "finish its work on the GPU", timeout_s)
        members = tuple(r["name"] for r in records)
        group = self._groups.get(members)

        def count() -> dict[str, Any]:
            settled = self._settle(group, gpu)["idle"] if group else []
            return {"left": len(group.allocations) - len(settled) if group else 0}

        left = [r["left"] for r in all_or_none(rendezvous, count, "look at its segments", timeout_s)]
        if any(left):
            raise InvalidConfig(
                f"shutdown: got {left} segments by rank in use or never closed by a peer, expected every buffer closed",
                rank=rendezvous.rank,
            )

        def free() -> dict[str, Any]:
            if group is not None:
                del self._groups[members]
                with _current(gpu):
                    group.comm.destroy()  # also destroys its windows and its device communicator
                for allocation in group.allocations.values():
                    self._free(allocation, gpu)
            return {}

        all_or_none(rendezvous, free, "free its segments", timeout_s)

    def _join(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory) -> _Connected:
        rank, size = rendezvous.rank, rendezvous.size

        def introduce() -> dict[str, Any]:
            if self._core is None:
                self._core = self._load(gpu.device)
            return {"name": self._name, "num_bytes": num_bytes, "host": host(), "gpu": gpu.uuid}

        def identify() -> dict[str, Any]:
            return {"id": bytes(self._core.get_unique_id()).hex() if rank == 0 else ""}

        def connect() -> dict[str, Any]:
            uid = self._core.UniqueId.from_bytes(bytes.fromhex(ids[0]["id"]))
            with _current(gpu):
                made.append(_Connected(self._core.Communicator.init(size, rank, uid)))
            return {}

        records = all_or_none(rendezvous, introduce, "load NCCL", timeout_s)
        sizes = [r["num_bytes"] for r in records]
        if len(set(sizes)) > 1:
            raise InvalidConfig(f"num_bytes: got {sizes} by rank, expected the same on every rank", rank=rank)
        members, made = tuple(r["name"] for r in records), list[_Connected]()
        if members in self._groups:
            return self._groups[members]
        require_own_gpus(rendezvous, [(r["host"], r["gpu"]) for r in records], timeout_s)
        ids = all_or_none(rendezvous, identify, "make the unique id of NCCL", timeout_s)
        all_or_none(rendezvous, connect, "connect to its peers", timeout_s)
        all_or_none(rendezvous, lambda: self._open_network(made[0], gpu), "open NCCL's network", timeout_s)
        self._groups[members] = made[0]
        return made[0]

    def _open_network(self, group: _Connected, gpu: DeviceMemory) -> dict[str, Any]:
        """Open NCCL's network to kernels if it connects all GPUs. NCCL reports the same network to all ranks."""
        every, known = self._core.NcclGinConnectionType.FULL, group.comm.properties
        if known.gin_connection_type != every:
            return {}
        with _current(gpu):
            made = group.comm.create_dev_comm(self._core.NCCLDevCommRequirements(gin_connection_type=every))
            image = ctypes.string_at(made.ptr, known.dev_comm_runtime_version_size)
            group.device_comm = gpu.zeros(len(image))
            group.device_comm.copy_(torch.frombuffer(bytearray(image), dtype=torch.uint8))  # `_settle` waits for it
        return {}

    def _settle(self, group: _Connected, gpu: DeviceMemory) -> dict[str, Any]:
        """List the segments that no work of this rank or of a peer can still access."""
        gpu.synchronize()
        idle = [[a.num_bytes, number] for number, a in group.allocations.items() if a.idle and _are_left(a)]
        return {"idle": idle, "attempts": group.num_attempts}

    def _extend(
        self, group: _Connected, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory
    ) -> int:
        """Allocate a segment on every rank; return the number of the allocation."""
        rank, wanted = rendezvous.rank, round_up(num_bytes, PAGE)
        group.num_attempts += 1
        number = group.num_attempts

        def take() -> dict[str, Any]:
            message = f"rank {rank} could not reserve a segment of {num_bytes} bytes with NCCL"
            free = free_bytes(gpu.device)
            if free is not None and free < wanted:
                raise OutOfSharedMemory(f"{message}: got {free} bytes free on {gpu.device}", rank=rank)
            with _current(gpu):
                try:
                    buffer = self._core.mem_alloc(wanted)
                except Exception as error:  # NCCL does not distinguish lack of memory from other errors
                    raise OutOfSharedMemory(f"{message}: {error}", rank=rank) from error
            group.allocations[number] = _Allocation(buffer, data=torch.utils.dlpack.from_dlpack(buffer))
            return {}

        def register() -> dict[str, Any]:
            # Signals are in this window. Strict ordering keeps a signal after the puts that precede it.
            flags = self._core.WindowFlag.COLL_SYMMETRIC | self._core.WindowFlag.STRICT_ORDERING
            with _current(gpu):
                allocation.window = window = group.comm.register_window(allocation.buffer, flags)
                if not window.handle:
                    raise InvalidConfig('heap "gin": got no window from NCCL, expected a GPU that has them', rank=rank)
                others = [window.get_peer_device_pointer(peer) or 0 for peer in range(rendezvous.size)]
            others[rank] = int(allocation.buffer.handle)
            allocation.addresses = others
            return {"unmapped": [peer for peer, address in enumerate(others) if not address]}

        try:
            all_or_none(rendezvous, take, "allocate its segment", timeout_s)
        except BaseException:
            if number in group.allocations:
                self._free(group.allocations.pop(number), gpu)
            raise
        allocation = group.allocations[number]
        records = all_or_none(rendezvous, register, "register its segment", timeout_s)
        unmapped = {f"rank {r}": record["unmapped"] for r, record in enumerate(records) if record["unmapped"]}
        if unmapped and group.device_comm is None:
            got = f"ranks that do not map each other, {unmapped}, and no network of NCCL's that connects all GPUs"
            raise InvalidConfig(f'heap "gin": got {got}, expected one; NCCL_DEBUG=INFO says why', rank=rank)
        allocation.num_bytes = wanted
        return number

    def _free(self, allocation: _Allocation, gpu: DeviceMemory) -> None:
        allocation.data = None
        with _current(gpu):
            self._core.mem_free(allocation.buffer)

    def _zero(self, allocation: _Allocation, gpu: DeviceMemory) -> dict[str, Any]:
        assert allocation.data is not None
        allocation.data.zero_()
        gpu.synchronize()
        return {}


@contextlib.contextmanager
def _current(gpu: DeviceMemory) -> Iterator[None]:
    """Make the GPU current in the calling thread, as NCCL requires; restore the caller's device."""
    with torch.cuda.device(gpu.device) if gpu.device.type == "cuda" else contextlib.nullcontext():
        yield


def _are_left(allocation: _Allocation) -> bool:
    """True if the last user's peers have written all their marks, which follow everything else."""
    if not allocation.marks or allocation.data is None:
        return True
    words = torch.stack([allocation.data[at : at + _WORD] for at in allocation.marks]).cpu()
    return bool((words != 0).any(dim=1).all())


_world = World()
allocate, mapped, shutdown = _world.allocate, _world.mapped, _world.shutdown
