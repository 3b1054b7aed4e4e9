"""Ranks agree on a buffer's configuration before any memory is shared: all get the same one, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_rt.config import BufferSpec
from moe_rt.errors import ConfigMismatch, InvalidConfig
from moe_rt.heap.rendezvous import Rendezvous, all_gather_records


def agree(rendezvous: Rendezvous, make_spec: Callable[[], BufferSpec], timeout_s: float) -> BufferSpec:
    """Makes this rank's spec and compares it with everyone's.

    A rank whose own values are wrong still takes part, so that its peers raise too instead of waiting for it.

    Raises:
        InvalidConfig: what `make_spec` raised here, or that it raised on a peer.
        ConfigMismatch: naming the first field that differs, the ranks and both values.
        CorruptPeer: what came for a rank is no record.
        PeerTimeout: a rank did not come.
    """
    spec: BufferSpec | None = None
    failure: InvalidConfig | None = None
    try:
        spec = make_spec()
        mine: dict[str, Any] = spec.record()
    except InvalidConfig as error:
        failure, mine = error, {"error": str(error)}
    records = all_gather_records(rendezvous, mine, timeout_s)
    if spec is None:
        assert failure is not None
        raise failure
    me = rendezvous.rank
    for peer, record in enumerate(records):
        if "error" in record:
            raise InvalidConfig(f"rank {peer} refused its own configuration: {record['error']}", rank=me, peer=peer)
    # Everyone is compared with rank 0, so that every rank names the same culprit.
    for peer, record in enumerate(records):
        for field in mine:
            expected = records[0].get(field)
            if record.get(field) != expected:
                message = f"{field}: got {record.get(field)} on rank {peer}, expected {expected} as on rank 0"
                raise ConfigMismatch(message, rank=me, peer=peer)
    return spec
