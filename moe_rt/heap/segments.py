"""What every heap makes, where each rank's segment is mapped here; and how ranks make it together or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_rt.errors import InvalidConfig, LimitReached, MoeRtError, SegmentPermission
from moe_rt.heap.processes import Watch
from moe_rt.heap.rendezvous import Rendezvous, all_gather_records

_LIMITS = {
    errno.EMFILE: "descriptors (ulimit -n)",
    errno.ENFILE: "descriptors on this host (fs.file-max)",
    errno.EAGAIN: "threads (ulimit -u, ulimit -v, pids.max of the control group)",
}
_LAST_THREAD_S = 0.5
PAGE = 4096  # segments start on it: the layout aligns its regions relative to the start


class DeviceMemory(Protocol):
    """What a heap needs to know of a GPU."""

    device: torch.device
    uuid: str  # of the GPU, or of the instance of one

    def zeros(self, num_bytes: int) -> Tensor:
        """Zero-filled bytes on the device, perhaps only after `synchronize`."""
        ...

    def synchronize(self) -> None:
        """Returns when everything the device was given to do is done."""
        ...


def round_up(num_bytes: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `num_bytes`."""
    return -(-num_bytes // to) * to


def address_of(mapping: mmap.mmap) -> int:
    """Address of a writable mapping. The ctypes view keeps it mapped, so the mapping must be kept and never closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Fewer address translations, where the system grants it; a wish, so a refusal is no error."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def ask_for_huge_pages_at(address: int, num_bytes: int) -> None:
    """As ask_for_huge_pages, for the whole pages of memory that somebody else has mapped."""
    first, end = round_up(address, PAGE), (address + num_bytes) // PAGE * PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


def all_or_none(
    rendezvous: Rendezvous, work: Callable[[], dict[str, Any]], what: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Every rank's record of its `work`; when the work raised on any rank, every rank raises.

    What is not ours becomes InvalidConfig, naming `what` could not be done; KeyboardInterrupt and the like stay what
    they are here, and are GroupPoisoned elsewhere.
    """
    with rendezvous:
        try:
            record = work()
        except Exception as error:
            ours = _as_ours(error, rendezvous.rank, what)
            if ours is error:
                raise
            raise ours from error
        return all_gather_records(rendezvous, record, timeout_s, what)


def take_all_or_none(rendezvous: Rendezvous, work: Callable[[], None], what: str, timeout_s: float) -> None:
    """As `all_or_none`, for `work` that takes what peers have made: it may fail as one of them has, who is named."""

    def take() -> dict[str, Any]:
        try:
            work()
        except Exception as error:
            rendezvous.raise_first_failure()
            # What a killed process had open is gone before its last thread is known to end.
            deadline = time.monotonic() + (_LAST_THREAD_S if isinstance(error, SegmentPermission) else 0.0)
            while time.monotonic() < deadline:
                time.sleep(_LAST_THREAD_S / 100)
                rendezvous.raise_first_failure()
            raise
        return {}

    all_or_none(rendezvous, take, what, timeout_s)


def no_memory(error: OSError | ValueError | OverflowError) -> bool:
    """Whether this is how the system says that so many bytes cannot be had, or that it cannot even count them."""
    return not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EFBIG)


def _as_ours(error: Exception, rank: int, what: str) -> MoeRtError:
    system_error = error.__cause__ if isinstance(error, MoeRtError) else error
    if isinstance(system_error, OSError) and system_error.errno in _LIMITS:
        got, limit = system_error.strerror, _LIMITS[system_error.errno]
        return LimitReached(f"rank {rank} could not {what}: got {got}, expected room for more {limit}", rank=rank)
    if isinstance(error, MoeRtError):
        return error
    return InvalidConfig(f"rank {rank} could not {what}: got {type(error).__name__}: {error}", rank=rank)


def free_bytes(device: torch.device) -> int | None:
    """What the device has left for others than torch, whose allocator keeps some; None where unknown."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class GinWindow:
    """How NCCL's network knows a segment: `communicator` lies in the GPU's memory, 0 where there is no network."""

    communicator: int
    window: int


@dataclass
class Segments:
    """`addresses[r]` is rank r's segment, zero-filled when handed out; mapped until `release`.

    An address is 0 where the segment cannot be reached by loads and stores, but only through the heap's network; CPU
    ranks have no mapping of it then, None, and do not know its process, 0.

    Attributes:
        watches: of the processes of CPU ranks that are not this one.
        mappings: what keeps the memory alive.
        symmetric: the own segment as the network of GPUs knows it: puts and gets name a place in a peer's segment by
            this address plus the offset. 0 in heaps without a network.
        gin: how NCCL knows it, where that is its network.
        marks: offsets in it of the words that peers leave last, for a heap that has to know when all has arrived; who
            makes an engine of it appends them.
        streams: where ranks share one GPU: the stream that each rank's kernels run on, one table for all ranks, which
            fill it. None elsewhere.
        members: of CPU ranks: the process of each, and the inode of its segment, 0 where it is no file.
        network: of CPU ranks: how peers on other hosts are reached, if there are any.
        maker: of ranks that are threads: this rank's ThreadGroup, the same object in all its buffers.
        on_release: called once by `release`.
    """

    addresses: list[int]
    watches: list[Watch | None]
    mappings: list[Any] = field(repr=False)
    symmetric: int = 0
    gin: GinWindow | None = None
    marks: list[int] = field(default_factory=list)
    streams: dict[int, int] | None = None
    members: list[tuple[int, int]] = field(default_factory=list)
    network: Any = field(default=None, repr=False)
    maker: object = field(default=None, repr=False)
    on_release: Callable[[], None] | None = field(default=None, repr=False)

    def add_far(self) -> None:
        """The next rank is on another host."""
        self.addresses.append(0)
        self.mappings.append(None)
        self.members.append((0, 0))
        self.watches.append(None)

    def release(self) -> None:
        """Drops the mappings and stops watching. Peers keep theirs: memory lives until the last rank lets go.

        It waits for nothing, so work on the memory may still be queued on a GPU. Before the memory is given to someone
        else the heaps nvshmem and gin wait for the GPU, and torch's allocator for the streams that it was told of.
        """
        self.watches, self.addresses, self.symmetric, self.network = [], [], 0, None
        self.mappings.clear()
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()

    def __del__(self) -> None:
        self.release()
