"""Heap for ranks that are threads of one process: anonymous memory, shared by address.

Every rank uses the same mapping of a segment, which is what lets ThreadSanitizer see both sides of a race.
"""

from __future__ import annotations

import mmap
import os
import threading

from moe_rt.heap.rendezvous import Rendezvous
from moe_rt.heap.segments import Segments, address_of, ask_for_huge_pages

# Mappings on their way from their owner to its peers, by address. Emptied before `allocate` returns.
_in_transit: dict[int, mmap.mmap] = {}
_lock = threading.Lock()


def allocate(rendezvous: Rendezvous, num_bytes: int, timeout_s: float) -> Segments:
    """Maps one segment per rank. Collective over the rendezvous."""
    mine = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(mine)
    address = address_of(mine)
    with _lock:
        _in_transit[address] = mine
    try:
        addresses = [int(a) for a in rendezvous.all_gather(str(address), timeout_s)]
        with _lock:
            mappings = [_in_transit[a] for a in addresses]
        rendezvous.all_gather("attached", timeout_s)
    finally:
        with _lock:
            del _in_transit[address]
    size = rendezvous.size
    return Segments(addresses, [None] * size, mappings, members=[(os.getpid(), 0)] * size)
