"""Heap for ranks that are processes with a GPU each: NVSHMEM's symmetric memory, over NVLink or a network.

Three properties of NVSHMEM shape this file:

* A process belongs to one world, which numbers its ranks (PEs) once. The group of the first buffer becomes the world,
  and a buffer of any other group is refused.
* Collectives have no time limit, and a rank that fails inside one may block its peers. So ranks first confirm through
  the rendezvous that all can continue, and report local failures before any rank waits.
* Freeing is collective, but a rank closes its buffer independently, when its garbage collector runs. So a released
  segment is kept, and handed out again once every rank has released it. Nothing collective happens at the end of the
  interpreter either; `shutdown` frees segments, collectively.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_rt.errors import InvalidConfig, OutOfSharedMemory
from moe_rt.group.all_or_none import all_or_none
from moe_rt.group.rendezvous import Rendezvous
from moe_rt.memory import nvshmem_start
from moe_rt.memory.segments import PAGE, DeviceMemory, Segments, free_bytes, round_up

UNIQUE_ID_BYTES = 128  # sizeof(nvshmemx_uniqueid_v1)
HEAP_STEP = 512 * 2**20  # default of NVSHMEM_CUMEM_GRANULARITY, the step in which the symmetric heap grows


@dataclass
class _Allocation:
    buffer: Any  # cuda.core.Buffer
    addresses: list[int] = field(default_factory=list)  # each rank's segment, at the first page of its buffer
    num_bytes: int = 0  # stays 0 if a rank failed: then no rank uses it
    idle: bool = True


class World:
    """NVSHMEM in one process: the ranks it connects, and its memory. `load` returns nvshmem.core and the device."""

    _core: Any  # both from `load`, once a buffer needs them
    _device: Any

    def __init__(self, load: Callable[[torch.device], tuple[Any, Any]] = nvshmem_start.load) -> None:
        self._load = load
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"  # pids repeat among containers
        self._members: list[str] | None = None  # names of all ranks in PE order, once they are connected
        self._gpu: DeviceMemory | None = None
        self._ours = False  # NVSHMEM was initialised here, and must be finalized here
        self._num_attempts = 0
        # Allocations by the number of the attempt, identical on every rank because attempts are collective.
        self._allocations: dict[int, _Allocation] = {}
        self._modules: list[int] = []

    def allocate(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory) -> Segments:
        """Initialise NVSHMEM if necessary and give every rank a segment. Collective: all ranks succeed or all raise.

        `timeout_s` limits the wait for ranks that do not arrive, not NVSHMEM's own collectives.

        Raises:
            OutOfSharedMemory: some rank has no memory for its segment.
            InvalidConfig: NVSHMEM cannot be used on some rank, or connects other ranks than those of the group.
            PeerTimeout: a rank did not arrive.
        """
        self._join(rendezvous, num_bytes, timeout_s, gpu)
        settled = all_or_none(rendezvous, lambda: self._settle(gpu), "finish its work on the GPU", timeout_s)
        idle = set.intersection(*({(size, number) for size, number in r["idle"]} for r in settled))
        fitting = [number for size, number in sorted(idle) if size >= num_bytes]
        if not fitting and any(r["have"] != settled[0]["have"] for r in settled):
            # Later segments would be at different offsets in the ranks' heaps, and puts would write to wrong places.
            got = "an earlier allocation that failed on some ranks only"
            raise InvalidConfig(f"NVSHMEM: got {got}, expected processes started anew", rank=rendezvous.rank)
        if not fitting:
            self._num_attempts = max(r["attempts"] for r in settled)  # a rank may have left one before it counted
        number = fitting[0] if fitting else self._extend(rendezvous, num_bytes, timeout_s, gpu)
        allocation = self._allocations[number]
        all_or_none(rendezvous, lambda: self._zero(allocation, gpu), "zero its segment", timeout_s)
        allocation.idle = False
        give_back, addresses = functools.partial(setattr, allocation, "idle", True), list(allocation.addresses)
        own = addresses[rendezvous.rank]
        return Segments(addresses, [None] * rendezvous.size, [], symmetric=own, on_release=give_back)

    def mapped(self, rendezvous: Rendezvous, timeout_s: float, gpu: DeviceMemory) -> list[bool]:
        """Return whose memory this rank maps; the network reaches others. Collective; raises like `allocate`."""
        segments = self.allocate(rendezvous, PAGE, timeout_s, gpu)
        mapped = [address != 0 for address in segments.addresses]
        segments.release()
        return mapped

    def shutdown(self, rendezvous: Rendezvous, timeout_s: float) -> bool:
        """Free all segments in the order they were made; finalize NVSHMEM if it was initialised here. Collective.

        Returns False if NVSHMEM had to be left as it is, because an allocation had failed on some ranks only.

        Raises:
            InvalidConfig: a buffer is still open on some rank, or the group is not the world.
        """

        def look() -> dict[str, Any]:
            if self._gpu is not None:
                self._gpu.synchronize()
            in_use = sum(not a.idle for a in self._allocations.values())
            return {"name": self._name, "world": self._members, "in_use": in_use, "have": list(self._allocations)}

        def free() -> dict[str, Any]:
            with self._current():
                for module in list(self._modules):
                    self.unregister_module(module)
                for number in common:
                    self._core.free(self._allocations.pop(number).buffer)
                if self._ours and not leftover:
                    self._core.finalize()
                    self._members, self._ours = None, False
            return {}

        records = all_or_none(rendezvous, look, "finish its work on the GPU", timeout_s)
        if all(r["world"] is None for r in records):
            return True
        self._require_same_world(records, rendezvous.rank)
        if any(r["in_use"] for r in records):
            counts = [r["in_use"] for r in records]
            message = f"shutdown: got {counts} segments in use by rank, expected every buffer closed"
            raise InvalidConfig(message, rank=rendezvous.rank)
        common = sorted(set.intersection(*(set(r["have"]) for r in records)))
        # Segments that only some ranks allocated cannot be freed collectively, and finalize would try.
        leftover = any(len(r["have"]) > len(common) for r in records)
        all_or_none(rendezvous, free, "free its segments", timeout_s)
        return not leftover

    def register_module(self, module: int) -> None:
        """Let the kernels of a loaded module (a CUmodule handle) call NVSHMEM's device functions. Local."""
        if self._members is None:
            raise InvalidConfig('module: got NVSHMEM not initialised, expected a buffer with heap "nvshmem" first')
        try:
            with self._current(), contextlib.redirect_stdout(io.StringIO()):  # module_init prints what it returns
                self._core.module_init(self._core.NvshmemKernelObject.from_handle(module))
        except Exception as error:
            raise InvalidConfig(f"module: got {type(error).__name__}: {error}, expected NVSHMEM to take it") from error
        self._modules.append(module)

    def unregister_module(self, module: int) -> None:
        """Undo `register_module`, before the module is unloaded. Does nothing after `shutdown`. Local."""
        if module in self._modules:
            self._modules.remove(module)
            kernel = self._core.NvshmemKernelObject.from_handle(module)
            kernel.finalize_handle = module  # nvshmem4py 0.4.1 looks for it and never sets it
            with self._current():
                self._core.module_finalize(kernel)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the GPU current in the calling thread, as NVSHMEM requires; restore the caller's device."""
        assert self._gpu is not None
        device = self._gpu.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._device.set_current()  # also if the thread has no context yet
            yield

    def _join(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory) -> None:
        rank, size = rendezvous.rank, rendezvous.size

        def introduce() -> dict[str, Any]:
            if self._members is None:
                nvshmem_start.disable_multicast()
                self._core, self._device = self._load(gpu.device)
                self._gpu = gpu
            bound = self._gpu.device if self._gpu else None
            if gpu.device != bound:
                raise InvalidConfig(f"gpu: got {gpu.device}, expected {bound}, which NVSHMEM uses here", rank=rank)
            s = self._core.InitStatus  # MPG: several ranks share a GPU
            active = self._core.init_status() in (s.STATUS_IS_INITIALIZED, s.STATUS_LIMITED_MPG, s.STATUS_FULL_MPG)
            if active and self._members is None:
                self._require_usable(rank, size)
            if self._members is not None and not active:
                message = "NVSHMEM: got it finalized by other means, expected moe_rt's own shutdown"
                raise InvalidConfig(message, rank=rank)
            place = {"host": nvshmem_start.host(), "gpu": gpu.uuid}
            return {"name": self._name, "world": self._members, "active": active, "num_bytes": num_bytes, **place}

        def identify() -> dict[str, Any]:
            uid = self._core.get_unique_id(empty=rank > 0)
            return {"id": ctypes.string_at(uid.ptr, UNIQUE_ID_BYTES).hex() if rank == 0 else ""}

        def initialise() -> dict[str, Any]:
            uid = self._core.get_unique_id(empty=True)
            ctypes.memmove(uid.ptr, bytes.fromhex(ids[0]["id"]), UNIQUE_ID_BYTES)
            with self._current():
                self._core.init(device=self._device, uid=uid, rank=rank, nranks=size, initializer_method="uid")
            self._ours = True
            self._require_usable(rank, size)  # remains of an earlier world would override init's arguments
            return {}

        records = all_or_none(rendezvous, introduce, "load NVSHMEM", timeout_s)
        self._require_same_world(records, rank)
        sizes = [r["num_bytes"] for r in records]
        if len(set(sizes)) > 1:
            raise InvalidConfig(f"num_bytes: got {sizes} by rank, expected the same on every rank", rank=rank)
        nvshmem_start.require_own_gpus(rendezvous, [(r["host"], r["gpu"]) for r in records], timeout_s)
        nvshmem_start.enable_gpu_networking([r["host"] for r in records])
        active = [r for r in range(size) if records[r]["active"]]
        if 0 < len(active) < size:
            message = f"NVSHMEM: got it initialised on ranks {active} of {size}, expected on all or on none"
            raise InvalidConfig(message, rank=rank)
        if not active:
            ids = all_or_none(rendezvous, identify, "make the unique id of NVSHMEM", timeout_s)
            all_or_none(rendezvous, initialise, "initialise NVSHMEM", timeout_s)
        self._members = [r["name"] for r in records]

    def _require_same_world(self, records: list[dict[str, Any]], rank: int) -> None:
        """Raise on every rank if a rank is in another world: all ranks see the same records."""
        members = [r["name"] for r in records]
        for peer, record in enumerate(records):
            if record["world"] not in (None, members):
                expected = f"{record['world']} as in the process of rank {peer}: NVSHMEM has one world per process"
                raise InvalidConfig(f"group: got {members}, expected {expected}", rank=rank, peer=peer)

    def _require_usable(self, rank: int, size: int) -> None:
        tracking = self._core._internal_tracking  # the Python layer refuses a world that was made without it
        if tracking._is_initialized["status"] != tracking.InternalInitStatus.INITIALIZED:
            message = "NVSHMEM: got it initialised by other means, expected nvshmem.core.init or nothing"
            raise InvalidConfig(message, rank=rank)
        got = (self._core.my_pe(), self._core.n_pes())
        if got != (rank, size):
            message = f"NVSHMEM: got PE {got[0]} of {got[1]}, expected PE {rank} of {size}, as ranks in the group"
            raise InvalidConfig(message, rank=rank)

    def _settle(self, gpu: DeviceMemory) -> dict[str, Any]:
        """List the segments that no work of this rank can still access, after its kernels and puts are done."""
        idle = [[a.num_bytes, number] for number, a in self._allocations.items() if a.idle]
        with self._current():
            gpu.synchronize()
            if self._allocations:
                self._core.quiet(stream=self._device.default_stream)
                gpu.synchronize()
        return {"idle": idle, "have": list(self._allocations), "attempts": self._num_attempts}

    def _extend(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory) -> int:
        """Allocate a segment on every rank; return the number of the allocation."""
        rank = rendezvous.rank
        wanted = round_up(num_bytes, PAGE) + PAGE  # NVSHMEM aligns to 512 bytes

        def look() -> dict[str, Any]:
            free, step = free_bytes(gpu.device), round_up(wanted, HEAP_STEP)
            if free is not None and free < step:
                message = f"rank {rank}: got {free} bytes free on {gpu.device}, expected {step} for a segment of"
                raise OutOfSharedMemory(f"{message} {num_bytes}: NVSHMEM grows in steps of {HEAP_STEP}", rank=rank)
            return {}

        def take() -> dict[str, Any]:
            with self._current():
                try:
                    buffer = self._core.buffer(wanted, except_on_del=False)  # the end of the interpreter is no error
                except self._core.NvshmemError as error:
                    message = f"rank {rank} could not reserve a segment of {num_bytes} bytes in NVSHMEM: {error}"
                    raise OutOfSharedMemory(message, rank=rank) from error
                allocation = self._allocations[number] = _Allocation(buffer)
                pad = -int(buffer.handle) % PAGE
                allocation.addresses = [self._address(buffer, pe, rank, pad) for pe in range(rendezvous.size)]
            return {"pad": pad}

        all_or_none(rendezvous, look, "look for free memory", timeout_s)  # inside NVSHMEM, a lack of it would hang
        self._num_attempts += 1
        number = self._num_attempts
        pads = [r["pad"] for r in all_or_none(rendezvous, take, "allocate its segment", timeout_s)]
        if len(set(pads)) > 1:
            message = f"NVSHMEM: got segments at {pads} bytes into a page by rank, expected one place"
            raise InvalidConfig(message, rank=rank)
        self._allocations[number].num_bytes = num_bytes
        return number

    def _address(self, buffer: Any, pe: int, rank: int, pad: int) -> int:
        if pe == rank:  # get_peer_buffer would count a second owner, and free() would then free nothing
            return int(buffer.handle) + pad
        try:
            return int(self._core.get_peer_buffer(buffer, pe).handle) + pad
        except self._core.NvshmemError:  # nvshmem_ptr gave a null pointer: reached over the network only
            return 0

    def _zero(self, allocation: _Allocation, gpu: DeviceMemory) -> dict[str, Any]:
        with self._current():
            allocation.buffer.fill(0, stream=self._device.default_stream)
            gpu.synchronize()
        return {}


_world = World()
allocate, mapped, shutdown = _world.allocate, _world.mapped, _world.shutdown
register_module, unregister_module = _world.register_module, _world.unregister_module
