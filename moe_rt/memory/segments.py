"""Memory that heaps make: each rank's segment as mapped here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_rt.group.processes import Watch

PAGE = 4096  # segments start on it: the layout aligns its regions relative to the start


class DeviceMemory(Protocol):
    """The properties of a GPU that heaps use."""

    device: torch.device
    uuid: str  # of the GPU, or of the instance of one

    def zeros(self, num_bytes: int) -> Tensor:
        """Return bytes on the device, zero at the latest after `synchronize`."""
        ...

    def synchronize(self) -> None:
        """Wait until all work of the device is done."""
        ...


def round_up(num_bytes: int, to: int) -> int:
    """Return the smallest multiple of `to` that is not below `num_bytes`."""
    return -(-num_bytes // to) * to


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of a writable mapping. The ctypes view keeps it mapped: keep it, and never close it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Request huge pages, which need fewer address translations. A refusal is no error."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def ask_for_huge_pages_at(address: int, num_bytes: int) -> None:
    """Request huge pages for the whole pages of memory that other code has mapped."""
    first, end = round_up(address, PAGE), (address + num_bytes) // PAGE * PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


def no_memory(error: OSError | ValueError | OverflowError) -> bool:
    """True if the error means that this much memory is not available, or that the size overflows."""
    return not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EFBIG)


def free_bytes(device: torch.device) -> int | None:
    """Return the device's memory that torch's allocator does not use; None if unknown."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class GinWindow:
    """A segment as NCCL's network addresses it. `communicator` is in the GPU's memory, 0 without a network."""

    communicator: int
    window: int


@dataclass
class Segments:
    """Every rank's segment: `addresses[r]` is rank r's, zero-filled when handed out, and mapped until `release`.

    An address is 0 if only the heap's network reaches the segment, and no loads and stores. CPU ranks then have no
    mapping of it, None, and do not know its process, 0.

    Attributes:
        watches: watches of the processes of CPU ranks other than this one.
        mappings: objects that keep the memory alive.
        symmetric: this rank's segment as the network of GPUs addresses it: puts and gets name a place in a peer's
            segment by this address plus the offset. 0 in heaps without a network.
        gin: the segment as NCCL addresses it, if NCCL is that network.
        marks: offsets of the words that peers write last, for a heap that must know when everything has arrived. They
            are appended when an engine is made.
        streams: if ranks share one GPU, the stream of each rank's kernels, in one table that all ranks fill. Else None.
        members: for CPU ranks, the process of each, and the inode of its segment, 0 if it is no file.
        network: for CPU ranks, the network that reaches peers on other hosts, if any.
        maker: for ranks that are threads, this rank's ThreadGroup, the same object in all its buffers.
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

    def add_remote(self) -> None:
        """Append a rank that is on another host."""
        self.addresses.append(0)
        self.mappings.append(None)
        self.members.append((0, 0))
        self.watches.append(None)

    def release(self) -> None:
        """Drop the mappings and stop watching. Peers keep theirs: memory lives until the last rank releases it.

        This waits for nothing, so work on the memory may still be queued on a GPU. Before the memory is reused, the
        heaps nvshmem and gin wait for the GPU, and torch's allocator for the streams recorded with it.
        """
        self.watches, self.addresses, self.symmetric, self.network = [], [], 0, None
        self.mappings.clear()
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()

    def __del__(self) -> None:
        self.release()
