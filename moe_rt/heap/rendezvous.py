"""How ranks find each other before they share memory: an all-gather of short texts, with an end."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from moe_rt.errors import CorruptPeer, InvalidConfig, PeerTimeout

FOREVER_S = 1e9  # 31 years; what clocks count in 64 bits of nanoseconds ends at 292


class Rendezvous(Protocol):
    """One rank's end of a meeting point. Every rank calls `all_gather` the same number of times."""

    rank: int
    size: int

    def all_gather(self, payload: str, timeout_s: float) -> list[str]:
        """Returns every rank's payload in rank order; raises PeerTimeout when a rank stays away."""
        ...


def all_gather_records(rendezvous: Rendezvous, record: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Every rank's record in rank order. They travel as JSON, and what arrives is data, whoever wrote it.

    Raises:
        CorruptPeer: what came for some rank is no JSON object; on every rank, since all read the same.
        PeerTimeout: a rank stayed away.
    """
    records = []
    for peer, payload in enumerate(rendezvous.all_gather(json.dumps(record), timeout_s)):
        try:
            found = json.loads(payload)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            message = f"rendezvous record of rank {peer}: got {payload[:80]!r}, expected a JSON object"
            raise CorruptPeer(message, rank=rendezvous.rank, peer=peer)
        records.append(found)
    return records


class StoreRendezvous:
    """Meets through the store of a process group, so it works for every back end and moves no tensor."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidConfig("group: got a process group that this rank is not a member of, expected a member")
        self._store = _get_process_group_store(group)
        # Counted in the store itself: buffers of one group are made in the same order on every rank.
        self._prefix = f"moe_rt/{self._store.add(f'moe_rt/buffers/{self.rank}', 1)}"
        self._round = 0

    def all_gather(self, payload: str, timeout_s: float) -> list[str]:
        keys = [f"{self._prefix}/{self._round}/{r}" for r in range(self.size)]
        self._store.set(keys[self.rank], payload)
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:  # DistStoreError derives from it
            missing = [r for r in range(self.size) if not self._store.check([keys[r]])]
            message = f"rank {self.rank}: ranks {missing} did not come to make a buffer within {timeout_s:g} s"
            raise PeerTimeout(message, rank=self.rank, peer=missing[0] if missing else -1) from error
        payloads = [self._store.get(key).decode(errors="replace") for key in keys]
        if self._round > 0:  # everyone who is in this round has read the one before
            self._store.delete_key(f"{self._prefix}/{self._round - 1}/{self.rank}")
        self._round += 1
        return payloads


class ThreadGroup:
    """A rank among ranks that are threads of one process. Make all of them at once with `ThreadGroup.make(size)`.

    Attributes:
        device: "cpu", or the CUDA device that all ranks share as virtual ranks.
    """

    def __init__(self, rank: int, size: int, device: Any, barrier: threading.Barrier, board: list[str]) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._barrier, self._board = barrier, board

    @classmethod
    def make(cls, size: int, device: Any = "cpu") -> list[ThreadGroup]:
        """`size` ranks that share one meeting point and one device; hand one to each thread."""
        barrier, board = threading.Barrier(size), [""] * size
        return [cls(rank, size, device, barrier, board) for rank in range(size)]

    def all_gather(self, payload: str, timeout_s: float) -> list[str]:
        self._board[self.rank] = payload
        try:
            self._barrier.wait(timeout_s)
            payloads = list(self._board)
            self._barrier.wait(timeout_s)  # nobody writes the next round before all have read this one
        except threading.BrokenBarrierError as error:
            message = f"rank {self.rank}: a rank of {self.size} did not come to make a buffer within {timeout_s:g} s"
            raise PeerTimeout(message, rank=self.rank) from error
        return payloads
