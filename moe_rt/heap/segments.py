"""A heap's product: where every rank's segment is mapped here, and how to watch its owner."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass, field


def address_of(mapping: mmap.mmap) -> int:
    """Address of a writable mapping. The ctypes view keeps it mapped, so the mapping must be kept and never closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Fewer address translations, where the system grants it; a wish, so a refusal is no error."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


@dataclass
class Segments:
    """`addresses[r]` is rank r's segment, zero-filled when handed out; mapped until `release`."""

    addresses: list[int]
    pidfds: list[int]
    mappings: list[mmap.mmap] = field(repr=False)

    def release(self) -> None:
        """Drops the mappings and stops watching. Peers keep theirs: memory lives until the last rank lets go."""
        for fd in self.pidfds:
            if fd >= 0:
                os.close(fd)
        self.pidfds, self.addresses = [], []
        self.mappings.clear()

    def __del__(self) -> None:
        self.release()
