"""A GPU that reaches some of its peers over a network: NVSHMEM's functions are those of network.h."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from ptx.gpu import PtxGpu

from moe_rt.memory import nvshmem

UNREACHABLE = {
    "all": lambda rank, peer: peer != rank,
    "every other": lambda rank, peer: (rank + peer) % 2 == 1,
}


class NetworkGpu(PtxGpu):
    """A PtxGpu some of whose peers' segments are not mapped.

    Args:
        unreachable: the unmapped peers, if `nodes` does not decide."""

    def __init__(self, unreachable: str = "all", nodes: Sequence[int] | None = None, **how: Any) -> None:
        super().__init__(**how)
        self.nodes = nodes
        self._unreachable = UNREACHABLE[unreachable]
        if nodes is not None:
            self._unreachable = lambda rank, peer: nodes[rank] != nodes[peer]
        nvshmem.register_module = lambda module: None

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Delay puts until a lane waits for them, or until every lane waits."""
        self._library.ptx_slow_network(True)
        yield
        self._library.ptx_slow_network(False)

    def _allocate(self, rendezvous: Any, num_bytes: int, *rest: Any) -> Any:
        """Stand-in for loopback.allocate, with symmetric memory."""
        segments = super()._allocate(rendezvous, num_bytes, *rest)
        rank, addresses = rendezvous.rank, segments.addresses
        segments.symmetric = addresses[rank]
        begins = (ctypes.c_uint64 * len(addresses))(*addresses)
        self._library.ptx_join_network(
            begins, len(addresses), rank, ctypes.c_void_p(self.stream()), ctypes.c_uint64(num_bytes)
        )
        segments.addresses = [0 if self._unreachable(rank, peer) else a for peer, a in enumerate(addresses)]
        return segments
