"""How ranks find each other before they share memory: an all-gather of short texts, with an end."""

from __future__ import annotations

import json
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import _get_process_group_store

from moe_rt.config.expect import expect
from moe_rt.config.topology import Topology
from moe_rt.errors import CallOrderMismatch, ConcurrentUse, CorruptPeer, InvalidConfig
from moe_rt.heap.attendance import Attendance
from moe_rt.heap.meeting import Meeting

Result = TypeVar("Result")


class _Seat:
    """What all rendezvous of one rank at the same store have in common."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.attendance = Attendance(store, rank, size)
        self.meeting: Meeting | None = None
        self.depth = self.thread = 0


_WHAT = "to"  # the field that says what a rank meets others for

# A group that is destroyed takes its own with it; one that is made anew, on the same store, too, begins anew.
_seats: weakref.WeakKeyDictionary[dist.ProcessGroup, _Seat] = weakref.WeakKeyDictionary()


class Rendezvous:
    """One rank's end of a meeting point. In each meeting every rank gathers as often as the others.

    `with rendezvous:` is one meeting: a rank that leaves it by any exception, KeyboardInterrupt too, tells the others,
    who raise where they next gather. Inside it, another `with` belongs to the same meeting; a gather outside is a
    meeting by itself. A meeting that failed, or that a rank stayed away from, spoils nothing: the next to which all
    ranks come takes place.

    Args:
        store: where ranks meet; the same for all.

    Attributes:
        topology: which node each rank is on.
    """

    def __init__(
        self, store: Store, rank: int, size: int, topology: Topology | None = None, seat: _Seat | None = None
    ) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.topology = topology or Topology.one_node(size)
        self._seat = seat or _Seat(store, rank, size)

    def __enter__(self) -> Rendezvous:
        seat = self._seat
        if seat.depth > 0 and seat.thread != threading.get_ident():
            message = f"rank {self.rank}: another thread is making a buffer as this rank, expected one at a time"
            raise ConcurrentUse(message, rank=self.rank)
        if seat.depth == 0:
            seat.thread = threading.get_ident()
            seat.meeting = Meeting(self._store, self.rank, self.size, seat.attendance)
        seat.depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seat = self._seat
        assert seat.meeting is not None
        if error is not None:
            seat.meeting.fail(error)  # before anything that peers still look for is cleared away further out
        seat.depth -= 1
        if seat.depth == 0:
            meeting, seat.meeting = seat.meeting, None
            meeting.leave()

    def raise_first_failure(self) -> None:
        """Raises what ended the meeting already, if anything has: a cause comes before what follows from it.

        Raises:
            PeerDead, StoreLost, GroupPoisoned, or what the rank that failed raised.
        """
        if self._seat.meeting is not None:
            self._seat.meeting.raise_first_failure()

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
            assert self._seat.meeting is not None
            return self._seat.meeting.gather(payload, timeout_s)


def all_gather_records(
    rendezvous: Rendezvous, record: dict[str, Any], timeout_s: float, what: str = "exchange records"
) -> list[dict[str, Any]]:
    """Every rank's record in rank order. They travel as JSON, and what arrives is data, whoever wrote it.

    Args:
        what: for people: what ranks meet for. Those that meet for different things all raise.

    Raises:
        CallOrderMismatch: ranks do not meet for the same; on every rank.
        CorruptPeer: what came for some rank is no JSON object; on every rank, since all read the same.
        PeerTimeout, PeerDead, StoreLost, GroupPoisoned: as `Rendezvous.all_gather`.
    """
    records: list[dict[str, Any]] = []
    purposes: list[Any] = []
    for peer, payload in enumerate(rendezvous.all_gather(json.dumps({**record, _WHAT: what}), timeout_s)):
        try:
            found = json.loads(payload)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            message = f"rendezvous record of rank {peer}: got {payload[:80]!r}, expected a JSON object"
            raise CorruptPeer(message, rank=rendezvous.rank, peer=peer)
        purposes.append(found.pop(_WHAT, what))
        records.append(found)
    for peer, purpose in enumerate(purposes):
        if purpose != purposes[0]:
            message = f"rank {peer} came to {purpose!s:.80}, expected to {purposes[0]!s:.80} as rank 0"
            raise CallOrderMismatch(message, rank=rendezvous.rank, peer=peer)
    return records


class StoreRendezvous(Rendezvous):
    """Meets through the store of a process group, so it works for every back end and moves no tensor."""

    def __init__(self, group: dist.ProcessGroup, topology: Topology | None = None) -> None:
        try:
            rank, store, size = dist.get_rank(group), _get_process_group_store(group), dist.get_world_size(group)
        except (ValueError, KeyError) as error:
            raise InvalidConfig("group: got a process group that was destroyed, expected a living one") from error
        super().__init__(store, rank, size, topology, _seats.setdefault(group, _Seat(store, rank, size)))
        self.group = group


class ThreadGroup(Rendezvous):
    """A rank among ranks that are threads of one process: `ThreadGroup.run(fn, size)` makes all and runs fn on each.

    `ThreadGroup.make(size)` makes them for threads of yours.

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

    @staticmethod
    def run(
        fn: Callable[..., Result],
        size: int,
        *arguments: Any,
        device: Any = "cpu",
        nodes: Sequence[int] | None = None,
        timeout_s: float = math.inf,
    ) -> list[Result]:
        """Runs fn(group, *arguments) on `size` ranks, each a thread with a group of its own, and returns their results.

        On a GPU each rank has a stream of its own.

        Args:
            fn: what each rank does. `group.rank` says which it is; `Buffer` and `MoELayer` take the group.
            size: the number of ranks.
            arguments: for every rank alike.
            device, nodes: as for `make`.
            timeout_s: for how long all of it may take.

        Returns:
            What fn returned, in the order of ranks.

        Raises:
            What fn raised on the rank that failed first. The others then have ten seconds to end: their next op tells
                them.
            TimeoutError: some ranks had not ended in time; it shows where they are.
            InvalidConfig: as `make`.
        """
        from moe_rt.heap.thread_ranks import ThreadRanks  # which makes groups, so it imports this module

        return ThreadRanks(size, device, nodes=nodes).run(fn, *arguments, seconds=timeout_s)
