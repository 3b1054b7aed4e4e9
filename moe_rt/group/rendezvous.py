"""Rendezvous of ranks before they share memory: an all-gather of short texts, with a timeout."""

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

from moe_rt.config.topology import Topology
from moe_rt.errors import CallOrderMismatch, ConcurrentUse, CorruptPeer, InvalidConfig, expect
from moe_rt.group.attendance import Attendance
from moe_rt.group.meeting import Meeting

Result = TypeVar("Result")


class _Seat:
    """State that all rendezvous of one rank at the same store share."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.attendance = Attendance(store, rank, size)
        self.meeting: Meeting | None = None
        self.depth = self.thread = 0


_WHAT = "to"  # field with the purpose of a rank's meeting

# A destroyed group takes its seat with it. A new group starts with a new seat, even on the same store.
_seats: weakref.WeakKeyDictionary[dist.ProcessGroup, _Seat] = weakref.WeakKeyDictionary()


class Rendezvous:
    """One rank's end of a rendezvous. Within a meeting, every rank gathers equally often.

    `with rendezvous:` is one meeting. A rank that leaves it by any exception, including KeyboardInterrupt, announces
    that, and the others raise at their next gather. A nested `with` belongs to the same meeting; a gather outside is a
    meeting by itself. A meeting that failed, or that a rank missed, does no harm: the next one that all ranks join
    takes place.

    Args:
        store: store through which all ranks meet.

    Attributes:
        topology: the node of each rank.
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
            seat.meeting.fail(error)  # before outer code clears what peers still read
        seat.depth -= 1
        if seat.depth == 0:
            meeting, seat.meeting = seat.meeting, None
            meeting.leave()

    def raise_first_failure(self) -> None:
        """Raise what has ended the meeting, if anything, so that a cause precedes its consequences.

        Raises:
            PeerDead, StoreLost, GroupPoisoned, or what the rank that failed raised.
        """
        if self._seat.meeting is not None:
            self._seat.meeting.raise_first_failure()

    def all_gather(self, payload: str, timeout_s: float) -> list[str]:
        """Return every rank's payload in rank order.

        Args:
            timeout_s: seconds to wait for the others; may be infinite.

        Raises:
            PeerTimeout: a rank did not arrive.
            PeerDead: the process of a rank on this host ended before it arrived.
            StoreLost: the store cannot be reached.
            GroupPoisoned, or what that rank raised: a rank left the meeting by an exception.
        """
        with self:
            assert self._seat.meeting is not None
            return self._seat.meeting.gather(payload, timeout_s)


def all_gather_records(
    rendezvous: Rendezvous, record: dict[str, Any], timeout_s: float, what: str = "exchange records"
) -> list[dict[str, Any]]:
    """Return every rank's record in rank order. Records travel as JSON, so nothing received is executed.

    Args:
        what: purpose of the meeting, for messages. If purposes differ, all ranks raise.

    Raises:
        CallOrderMismatch: the purposes of ranks differ; on every rank.
        CorruptPeer: the record of some rank is no JSON object; on every rank, since all read the same.
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
    """Rendezvous through the store of a process group. Works with every torch backend and moves no tensor."""

    def __init__(self, group: dist.ProcessGroup, topology: Topology | None = None) -> None:
        try:
            rank, store, size = dist.get_rank(group), _get_process_group_store(group), dist.get_world_size(group)
        except (ValueError, KeyError) as error:
            raise InvalidConfig("group: got a process group that was destroyed, expected a living one") from error
        super().__init__(store, rank, size, topology, _seats.setdefault(group, _Seat(store, rank, size)))
        self.group = group


class ThreadGroup(Rendezvous):
    """A rank among ranks that are threads of one process: `ThreadGroup.run(fn, size)` makes all and runs fn on each.

    `ThreadGroup.make(size)` makes them for the caller's own threads.

    Attributes:
        device: "cpu", or the CUDA device that all ranks share as virtual ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, device: Any, topology: Topology | None = None) -> None:
        super().__init__(store, rank, size, topology)
        self.device = device

    @classmethod
    def make(cls, size: int, device: Any = "cpu", nodes: Sequence[int] | None = None) -> list[ThreadGroup]:
        """Make `size` ranks that share one rendezvous and one device; hand one to each thread.

        Args:
            nodes: the node of each rank, numbered from 0; None for one node.

        Raises:
            InvalidConfig: the length of `nodes` is not `size`, or `nodes` skips a number.
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
        """Run fn(group, *arguments) on `size` ranks, each a thread with its own group, and return their results.

        Each rank on a GPU also has its own stream.

        Args:
            fn: function that each rank runs. `group.rank` is its rank; `Buffer` and `MoELayer` take the group.
            size: number of ranks.
            arguments: passed to every rank.
            device, nodes: as for `make`.
            timeout_s: time limit for the whole run.

        Returns:
            The results of fn, in rank order.

        Raises:
            The error of the rank that failed first. The others, which raise at their next op, have ten seconds to end.
            TimeoutError: some ranks had not ended in time; the message has their stacks.
            InvalidConfig: as `make`.
        """
        from moe_rt.group.thread_ranks import ThreadRanks  # it makes groups, so it imports this module

        return ThreadRanks(size, device, nodes=nodes).run(fn, *arguments, seconds=timeout_s)
