"""Ranks agree on a buffer's configuration before any memory is shared: all get the same one, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_rt.config.spec import BufferSpec
from moe_rt.errors import ConfigMismatch, InvalidConfig
from moe_rt.heap.rendezvous import Rendezvous
from moe_rt.heap.segments import all_or_none


def agree(rendezvous: Rendezvous, make_spec: Callable[[], BufferSpec], timeout_s: float) -> BufferSpec:
    """Makes this rank's spec and compares it with everyone's.

    A rank whose own values are wrong says so, and its peers raise too instead of waiting for it.

    Raises:
        InvalidConfig: `make_spec` raised here, whatever it was, or on a peer.
        ConfigMismatch: naming the first field that differs, the ranks and both values.
        CorruptPeer: what came for a rank is no record.
        PeerTimeout, PeerDead, StoreLost: a rank did not come, or will never come.
    """
    specs: list[BufferSpec] = []

    def make() -> dict[str, Any]:
        specs.append(make_spec())
        return specs[0].record()

    me = rendezvous.rank
    try:
        records = all_or_none(rendezvous, make, "make its configuration", timeout_s)
    except InvalidConfig as error:
        if error.peer < 0:  # our own
            raise
        message = f"rank {error.peer} refused its own configuration: {error}"
        raise InvalidConfig(message, rank=me, peer=error.peer) from None
    # Everyone is compared with rank 0, so that every rank names the same faulty rank.
    for peer, record in enumerate(records):
        for field in records[me]:
            expected = records[0].get(field)
            if record.get(field) != expected:
                message = f"{field}: got {record.get(field)} on rank {peer}, expected {expected} as on rank 0"
                raise ConfigMismatch(message, rank=me, peer=peer)
    return specs[0]
