"""How ranks find each other before they share memory: an all-gather of short texts, with an end."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import _get_process_group_store

from moe_rt.config.expect import expect
from moe_rt.config.topology import Topology
from moe_rt.errors import ConcurrentUse, CorruptPeer, InvalidConfig
from moe_rt.heap.meeting import Meeting


class Rendezvous:
    """One rank's end of a meeting point. Every rank meets as often as the others, and gathers as often in each meeting.

    `with rendezvous:` is one meeting: a rank that leaves it by any exception, KeyboardInterrupt too, tells the others,
    who raise where they next gather. Inside it, another `with` belongs to the same meeting; a gather outside is a
    meeting by itself. A meeting that failed spoils nothing: all ranks can go to the next.

    Args:
        store: where ranks meet; the same for all.

    Attributes:
        topology: which node each rank is on.
    """

    def __init__(self, store: Store, rank: int, size: int, topology: Topology | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.topology = topology or Topology.one_node(size)
        self._meeting: Meeting | None = None
        self._depth = self._thread = 0

    def __enter__(self) -> Rendezvous:
        if self._depth > 0 and self._thread != threading.get_ident():
            message = f"rank {self.rank}: another thread is making a buffer as this rank, expected one at a time"
            raise ConcurrentUse(message, rank=self.rank)
        if self._depth == 0:
            self._thread, self._meeting = threading.get_ident(), Meeting(self._store, self.rank, self.size)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._meeting is not None
        if error is not None:
            self._meeting.fail(error)  # before anything that peers still look for is cleared away further out
        self._depth -= 1
        if self._depth == 0:
            meeting, self._meeting = self._meeting, None
            meeting.leave()

    def raise_first_failure(self) -> None:
        """Raises what ended the meeting already, if anything has: a cause comes before what follows from it.

        Raises:
            PeerDead, StoreLost, GroupPoisoned, or what the rank that failed raised.
        """
        if self._meeting is not None:
            self._meeting.raise_first_failure()

    def all_gather(self, payload: str, timeout_s: float) -> list[str]:
        """Every rank's payload in rank order.

        Args:
            timeout_s: seconds to wait for the others; may be infinite.

        Raises:
            PeerTimeout: a rank stayed away.
            PeerDead: the process of a rank on this host ended before it came.
            StoreLost: the store cannot be reached.
            GroupPoisoned, or what that rank raised: a rank left the meeting by an exception.
        """
        with self:
            assert self._meeting is not None
            return self._meeting.gather(payload, timeout_s)


def all_gather_records(rendezvous: Rendezvous, record: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Every rank's record in rank order. They travel as JSON, and what arrives is data, whoever wrote it.

    Raises:
        CorruptPeer: what came for some rank is no JSON object; on every rank, since all read the same.
        PeerTimeout, PeerDead, StoreLost, GroupPoisoned: as `Rendezvous.all_gather`.
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


class StoreRendezvous(Rendezvous):
    """Meets through the store of a process group, so it works for every back end and moves no tensor."""

    def __init__(self, group: dist.ProcessGroup, topology: Topology | None = None) -> None:
        try:
            rank, store, size = dist.get_rank(group), _get_process_group_store(group), dist.get_world_size(group)
        except (ValueError, KeyError) as error:
            raise InvalidConfig("group: got a process group that was destroyed, expected a living one") from error
        super().__init__(store, rank, size, topology)
        self.group = group


class ThreadGroup(Rendezvous):
    """A rank among ranks that are threads of one process. Make all of them at once with `ThreadGroup.make(size)`.

    Attributes:
        device: "cpu", or the CUDA device that all ranks share as virtual ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, device: Any, topology: Topology | None = None) -> None:
        super().__init__(store, rank, size, topology)
        self.device = device

    @classmethod
    def make(cls, size: int, device: Any = "cpu", nodes: Sequence[int] | None = None) -> list[ThreadGroup]:
        """`size` ranks that share one meeting point and one device; hand one to each thread.

        Args:
            nodes: the node that each rank is said to be on, numbered from 0; None for one node.

        Raises:
            InvalidConfig: `nodes` are not of so many ranks, or leave a number out.
        """
        expect(nodes is None or len(nodes) == size, "nodes", nodes, f"a node for each of {size} ranks")
        store, topology = HashStore(), None if nodes is None else Topology(tuple(nodes))
        return [cls(store, rank, size, device, topology) for rank in range(size)]
