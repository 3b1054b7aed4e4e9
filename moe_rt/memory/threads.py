"""Heap for ranks that are threads of one process: anonymous memory, shared by address.

Every rank uses the same mapping of a segment, so that ThreadSanitizer sees both sides of a race.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from typing import Any
from weakref import WeakValueDictionary

from moe_rt.errors import OutOfSharedMemory
from moe_rt.group.all_or_none import all_or_none, take_all_or_none
from moe_rt.group.rendezvous import Rendezvous
from moe_rt.memory.segments import Segments, address_of, ask_for_huge_pages, no_memory

# Mappings on their way from their owner to its peers, by a random name. Emptied before `allocate` returns.
_in_transit: dict[str, mmap.mmap] = {}
_open: WeakValueDictionary[int, Segments] = WeakValueDictionary()  # every rank's, by its own segment's address
_lock = threading.Lock()


def others_of(segments: Segments, rank: int) -> list[Segments]:
    """Return the other segments that a rank of this buffer has open: it made them with the same ThreadGroup."""
    with _lock:
        here = _open.get(segments.addresses[rank]) if segments.addresses else None
        if here is None:
            return []
        return [s for s in _open.values() if s is not here and s.maker is here.maker]


def allocate(rendezvous: Rendezvous, num_bytes: int, timeout_s: float) -> Segments:
    """Map one segment per rank. Collective: either every rank succeeds or every rank raises.

    Raises:
        OutOfSharedMemory: the address space has no space for some rank's segment.
    """
    name = secrets.token_hex(8)

    def make() -> dict[str, Any]:
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            if not no_memory(error):
                raise
            message = f"rank {rendezvous.rank} could not reserve a segment of {num_bytes} bytes: {error}"
            raise OutOfSharedMemory(message, rank=rendezvous.rank) from error
        ask_for_huge_pages(mapping)
        with _lock:
            _in_transit[name] = mapping
        return {"name": name}

    def take() -> None:
        with _lock:
            mappings.extend(_in_transit[record["name"]] for record in records)

    mappings: list[mmap.mmap] = []
    with rendezvous:
        try:
            records = all_or_none(rendezvous, make, "make its segment", timeout_s)
            take_all_or_none(rendezvous, take, "take its peers' segments", timeout_s)
        finally:
            with _lock:
                _in_transit.pop(name, None)
    size = rendezvous.size
    addresses = [address_of(m) for m in mappings]
    segments = Segments(addresses, [None] * size, mappings, members=[(os.getpid(), 0)] * size, maker=rendezvous)
    with _lock:
        _open[addresses[rendezvous.rank]] = segments
    return segments
