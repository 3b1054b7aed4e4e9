"""Agreement on a buffer's configuration before memory is shared: all ranks get the same one, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_rt.config.spec import BufferSpec
from moe_rt.errors import ConfigMismatch, InvalidConfig
from moe_rt.heap.rendezvous import Rendezvous
from moe_rt.heap.segments import all_or_none


def agree(rendezvous: Rendezvous, make_spec: Callable[[], BufferSpec], timeout_s: float) -> BufferSpec:
    """Make this rank's spec and compare it with the specs of all ranks. Collective.

    A rank whose own values are invalid reports that, so that its peers raise also instead of waiting for it.

    Raises:
        InvalidConfig: `make_spec` raised some exception, here or on a peer.
        ConfigMismatch: the specs differ; names the first such field, the ranks and both values.
        CorruptPeer: the record received from a rank is malformed.
        PeerTimeout, PeerDead, StoreLost: a rank did not join, or can no longer join.
    """
    specs: list[BufferSpec] = []

    def make() -> dict[str, Any]:
        specs.append(make_spec())
        return specs[0].record()

    me = rendezvous.rank
    try:
        records = all_or_none(rendezvous, make, "make its configuration", timeout_s)
    except InvalidConfig as error:
        if error.peer < 0:  # raised by make_spec
            raise
        message = f"rank {error.peer} refused its own configuration: {error}"
        raise InvalidConfig(message, rank=me, peer=error.peer) from None
    # Every rank is compared with rank 0, so that all name the same faulty rank.
    for peer, record in enumerate(records):
        for field in records[me]:
            expected = records[0].get(field)
            if record.get(field) != expected:
                message = f"{field}: got {record.get(field)} on rank {peer}, expected {expected} as on rank 0"
                raise ConfigMismatch(message, rank=me, peer=peer)
    return specs[0]
