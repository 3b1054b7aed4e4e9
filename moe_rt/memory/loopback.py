"""Heap for ranks that are threads sharing one GPU: every segment is a slice of one region of its memory.

Kernels of all ranks run the protocol against each other on a single device, so that one device suffices to test it.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

import torch
from torch import Tensor

from moe_rt.errors import InvalidConfig, OutOfSharedMemory
from moe_rt.group.all_or_none import all_or_none, take_all_or_none
from moe_rt.group.rendezvous import Rendezvous
from moe_rt.memory.segments import PAGE, DeviceMemory, Segments, round_up

# Regions and tables of streams on their way from rank 0 to its peers. Their names are random: an address of another
# process could equal one of this process.
_in_transit: dict[str, tuple[Tensor, dict[int, int]]] = {}
_lock = threading.Lock()


def allocate(rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: DeviceMemory) -> Segments:
    """Make the region on rank 0 and share it with all ranks. Collective: every rank succeeds or every rank raises.

    Raises:
        OutOfSharedMemory: the device has no memory for the segments of all ranks.
        InvalidConfig: ranks are on different devices or in different processes, or disagree about the size.
        PeerTimeout: a rank did not arrive.
    """
    stride, rank = round_up(num_bytes, PAGE), rendezvous.rank
    name = secrets.token_hex(8)
    taken: list[tuple[Tensor, dict[int, int]]] = []

    def make() -> dict[str, Any]:
        mine = {"name": name, "device": str(gpu.device), "num_bytes": num_bytes}
        if rank > 0:
            return mine
        total = stride * rendezvous.size + PAGE  # devices promise less alignment than a page
        try:
            region = gpu.zeros(total)
        except (torch.OutOfMemoryError, MemoryError) as error:
            message = f"rank 0 could not reserve {total} bytes for {rendezvous.size} segments on {gpu.device}: {error}"
            raise OutOfSharedMemory(message, rank=rank) from error
        gpu.synchronize()  # peers' streams do not wait for the one that writes the zeros
        with _lock:
            _in_transit[name] = (region, {})
        return mine

    def take(records: list[dict[str, Any]]) -> None:
        for field in ("device", "num_bytes"):
            got, expected = records[rank][field], records[0][field]
            if got != expected:
                message = f'heap "loopback": {field}: got {got} on rank {rank}, expected {expected} as on rank 0'
                raise InvalidConfig(message, rank=rank)
        with _lock:
            shared = _in_transit.get(records[0]["name"])
        if shared is None:
            message = f'heap "loopback": got rank {rank} in another process than rank 0, expected threads of one'
            raise InvalidConfig(message, rank=rank)
        taken.append(shared)

    try:
        records = all_or_none(rendezvous, make, "make segments on its GPU", timeout_s)
        take_all_or_none(rendezvous, lambda: take(records), "take its segment", timeout_s)
    finally:
        with _lock:
            _in_transit.pop(name, None)
    region, streams = taken[0]
    base = round_up(region.data_ptr(), PAGE)
    addresses = [base + r * stride for r in range(rendezvous.size)]
    return Segments(addresses, [None] * rendezvous.size, [region], streams=streams)
