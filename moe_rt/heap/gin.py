"""Heap for ranks that are processes with a GPU each: windows of NCCL, over NVLink or over GIN, its network of GPUs.

Four properties of NCCL shape this file:

* A communicator connects the ranks of one group. Each group gets one of its own, with its first buffer.
* Its collectives have no time limit, and a rank that fails inside one may take its peers along. So ranks first tell
  each other through the rendezvous that they can all go on, and what fails at home is told before anyone waits for it.
* Registering is collective, but a rank closes its buffer alone, when its garbage collector sees fit. So a segment that
  is let go of is kept, and handed out again once every rank has let go of it; `shutdown` frees, where all can come.
* Nobody can wait until what it has put has arrived. But when a buffer is closed, each peer leaves marks that come after
  all else: whoever has seen all of them will find nothing more in its segment. A segment without them is never used
  again: that of a group one of whose ranks was killed, or could not make its engine.
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
from moe_rt.heap.nvshmem_start import host, require_own_gpus
from moe_rt.heap.rendezvous import Rendezvous
from moe_rt.heap.segments import PAGE, DeviceMemory, GinWindow, Segments, all_or_none, free_bytes, round_up

SINCE = (2, 32)  # the oldest NCCL whose functions for strong signals can be linked
_WORD = 8  # bytes of a mark


def load(device: torch.device) -> Any:
    """nccl.core. Imported late: nobody else needs it.

    Raises:
        InvalidConfig: no package, or a library that is too old, with what to install.
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
    if found is None or found.version.release[:2] < SINCE:
        got = "no library of NCCL" if found is None else f"NCCL {found.version}, {found.path}"
        raise InvalidConfig(f'heap "gin": got {got}, expected {SINCE[0]}.{SINCE[1]} or newer; {install}')
    return core


@dataclass
class _Allocation:
    buffer: Any  # cuda.core.Buffer
    window: Any = None
    data: Tensor | None = None  # the bytes of the buffer
    addresses: list[int] = field(default_factory=list)  # of the segments; 0 where they are not mapped
    num_bytes: int = 0  # stays 0 when a rank failed: then it is nobody's
    idle: bool = True
    marks: list[int] = field(default_factory=list)  # where its last user's peers leave theirs


@dataclass
class _Connected:
    """The ranks of one group."""

    comm: Any
    device_comm: Tensor | None = None  # in the GPU's memory; None where NCCL has no network
    allocations: dict[int, _Allocation] = field(default_factory=dict)  # by the number of the attempt, as on all ranks
    num_attempts: int = 0


class World:
    """NCCL in one process: the groups that it connects, and what memory they have. `load` gives nccl.core."""

    def __init__(self, load: Callable[[torch.device], Any] = load) -> None:
        self._load = load
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"  # pids repeat among containers
        self._core: Any = None
        self._groups: dict[tuple[str, ...], _Connected] = {}  # by the names of all ranks, in their order

    def allocate(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory) -> Segments:
        """Connects the group if need be and gives every rank a segment. Collective: all ranks succeed or all raise.

        `timeout_s` limits the waiting for ranks that do not come, not NCCL's own collectives.

        Raises:
            OutOfSharedMemory: some rank has no room for its segment.
            InvalidConfig: NCCL cannot be used on some rank, or reaches a rank neither by NVLink nor over GIN.
            PeerTimeout: a rank did not come.
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
        """Whose memory this rank maps; others are reached over the network. Collective, and raises as `allocate`."""
        segments = self.allocate(rendezvous, PAGE, timeout_s, gpu)
        mapped = [address != 0 for address in segments.addresses]
        segments.release()
        return mapped

    def shutdown(self, rendezvous: Rendezvous, timeout_s: float, gpu: DeviceMemory) -> None:
        """Frees all segments of the group and ends its communicator. Collective.

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
                f"shutdown: got {left} segments by rank in use or never closed by a peer, expected every buffer closed"
            )

        def free() -> dict[str, Any]:
            if group is not None:
                del self._groups[members]
                with _current(gpu):
                    group.comm.destroy()  # its windows and its device communicator, too
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
            raise InvalidConfig(f"num_bytes: got {sizes} by rank, expected the same on every rank")
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
        """NCCL tells all ranks of a communicator the same of its network."""
        every, known = self._core.NcclGinConnectionType.FULL, group.comm.properties
        if known.gin_connection_type != every:
            return {}
        with _current(gpu):
            made = group.comm.create_dev_comm(self._core.NCCLDevCommRequirements(gin_connection_type=every))
            told = ctypes.string_at(made.ptr, known.dev_comm_runtime_version_size)
            group.device_comm = gpu.zeros(len(told))
            group.device_comm.copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))
            gpu.synchronize()
        return {}

    def _settle(self, group: _Connected, gpu: DeviceMemory) -> dict[str, Any]:
        """Nothing that this rank or a peer still does reaches a segment that it lists here."""
        gpu.synchronize()
        idle = [[a.num_bytes, number] for number, a in group.allocations.items() if a.idle and _are_left(a)]
        return {"idle": idle, "attempts": group.num_attempts}

    def _extend(
        self, group: _Connected, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory
    ) -> int:
        """Allocates anew on every rank; the number of the allocation."""
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
                except Exception as error:  # NCCL does not tell want of memory from other errors
                    raise OutOfSharedMemory(f"{message}: {error}", rank=rank) from error
            group.allocations[number] = _Allocation(buffer, data=torch.utils.dlpack.from_dlpack(buffer))
            return {}

        def register() -> dict[str, Any]:
            # Signals lie in it, and are in order with what is put before them if the window is.
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
    """NCCL works on the device that is current in the calling thread; the caller's is restored."""
    with torch.cuda.device(gpu.device) if gpu.device.type == "cuda" else contextlib.nullcontext():
        yield


def _are_left(allocation: _Allocation) -> bool:
    """Whether all marks are there that the last user's peers leave, after everything else."""
    if not allocation.marks or allocation.data is None:
        return True
    words = torch.stack([allocation.data[at : at + _WORD] for at in allocation.marks]).cpu()
    return bool((words != 0).any(dim=1).all())


_world = World()
allocate, mapped, shutdown = _world.allocate, _world.mapped, _world.shutdown
