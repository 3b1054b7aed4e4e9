"""Going on without the dead: the ranks that are left agree on who they are and become the new default process group.

Ranks agree through the store of the old group: each leaves a mark, and the first that has seen all marks it may still
expect writes down who is left. There is one decision, and everyone, late ranks included, goes by it. Nothing of the old
group is used again: buffers made on the new one have segments of their own, so a rank that was given up but still runs
writes into memory that nobody reads any more.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_group, _get_process_group_store

from moe_rt.errors import InvalidConfig, PeerTimeout, RankExcluded
from moe_rt.heap.board import reaching_store
from moe_rt.heap.processes import Watch, place, watch
from moe_rt.heap.rendezvous import StoreRendezvous, all_gather_records
from moe_rt.heap.segments import all_or_none

_LOOK_EVERY_S = 0.001


class ElasticGroup:
    """The ranks of the default process group, and whose processes have ended. Making it is collective.

    Args:
        timeout_s: seconds to wait for all ranks to come.

    Raises:
        InvalidConfig: the group's back end is not gloo. NCCL and NVSHMEM cannot go on without a rank.
        PeerTimeout: a rank did not come.
        LimitReached: a rank may not open the descriptors by which it watches its peers.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        backend = dist.get_backend()
        if backend != "gloo":
            raise InvalidConfig(f"default process group: got back end {backend}, expected gloo")
        group = _get_default_group()
        self._rank, self._store = dist.get_rank(), _default_store()
        self._timeout = group._get_backend(torch.device("cpu")).options._timeout
        self._attempts = 0
        here, rendezvous = {**place(), "name": secrets.token_hex(8)}, StoreRendezvous(group)
        places = all_gather_records(rendezvous, here, timeout_s, "learn of its peers' processes")
        # What is decided in this group: a job that was started anew finds in its store what the one before had decided.
        self._name = str(places[0].get("name"))
        self._watches: list[Watch | None] = []  # None for a rank elsewhere: only its silence tells

        def watch_all() -> dict[str, Any]:
            self._watches = [watch(p["pid"]) if p.get("where") == here["where"] else None for p in places]
            return {}

        all_or_none(rendezvous, watch_all, "watch its peers' processes", timeout_s)

    def survivors(self, timeout_s: float = 30.0) -> list[int]:
        """Replaces the default process group by one of the ranks that are left, in their old order.

        Collective over the ranks that are alive, after an op has failed on each and its buffers were left. Other
        process groups are gone as well. A rank whose process ended on this host is not waited for. The new group has
        the old one's timeout, and this object its members. If this raises PeerTimeout, it does so on every rank that
        is left, and each calls it again, as often as ranks die meanwhile.

        Args:
            timeout_s: seconds to wait for a rank that may be alive; one that stays silent for longer is left out.

        Returns:
            The old ranks of those that are left.

        Raises:
            RankExcluded: the others did not wait for this rank; it has no group any more, and should end.
            StoreLost: the store was served by a process that ended.
            PeerTimeout: a rank that had left its mark ended before the new group was made.
        """
        self._attempts += 1
        store = PrefixStore(f"moe_rt/survivors/{self._name}/{self._attempts}", self._store)
        if dist.is_initialized():
            dist.destroy_process_group()
        with reaching_store(self._rank):
            left = self._decide(store, timeout_s)
            if self._rank not in left:
                raise self._excluded(left)
            failure = self._join(store, left)
            # The first to know says it for all: a rank held up until now must not go on in a group that others gave up.
            formed = store.compare_set("formed", "", str(failure is None)) == b"True"
        if not formed:
            message = f"rank {self._rank}: one of the ranks {left} that are left did not join the new group"
            raise PeerTimeout(message, rank=self._rank) from failure
        if failure is not None:
            raise self._excluded(left) from failure
        self._watches = [self._watches[r] for r in left]
        self._rank, self._store, self._attempts = dist.get_rank(), _default_store(), 0
        return left

    def _decide(self, store: Store, timeout_s: float) -> list[int]:
        """Old ranks that are left, the same answer on every rank that asks."""
        size = len(self._watches)
        store.set(f"here/{self._rank}", "1")
        deadline = time.monotonic() + timeout_s
        missing = set(range(size))
        while missing and time.monotonic() < deadline and not store.check(["decision"]):
            missing = {r for r in missing if not (self._has_ended(r) or store.check([f"here/{r}"]))}
            time.sleep(_LOOK_EVERY_S)
        left = [r for r in range(size) if store.check([f"here/{r}"]) and not self._has_ended(r)]
        # The first to get here decides for all: ranks may have looked at different times and seen different marks.
        return json.loads(store.compare_set("decision", "", json.dumps(left)))

    def _has_ended(self, rank: int) -> bool:
        watched = self._watches[rank]
        return watched is not None and watched.has_ended()

    def _join(self, store: Store, left: list[int]) -> RuntimeError | None:
        """Makes the new group; returns why it could not be made."""
        rank, size = left.index(self._rank), len(left)
        store = PrefixStore("group", store)
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=self._timeout)
        except RuntimeError as error:
            return error
        return None

    def _excluded(self, left: list[int]) -> RankExcluded:
        message = f"rank {self._rank} came too late: ranks {left} have gone on without it"
        return RankExcluded(message, rank=self._rank)


def _default_store() -> Store:
    return _get_process_group_store(_get_default_group())
