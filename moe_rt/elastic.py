"""Recovery after a rank died: the surviving ranks agree on their members and form a new default process group.

Ranks agree through the store of the old group. Each sets a mark, and the first rank that has seen every mark it can
still expect writes down the survivors. Only one decision exists, and every rank, however late, follows it. Nothing of
the old group is used again: buffers made on the new group have new segments, so a rank that was given up but still runs
writes into memory that no survivor reads.
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
from moe_rt.group.all_or_none import all_or_none
from moe_rt.group.board import reaching_store
from moe_rt.group.processes import Watch, place, watch
from moe_rt.group.rendezvous import StoreRendezvous, all_gather_records

_LOOK_EVERY_S = 0.001


class ElasticGroup:
    """The ranks of the default process group, with a watch on their processes. The constructor is collective.

    Args:
        timeout_s: seconds to wait for all ranks to join.

    Raises:
        InvalidConfig: the group's back end is not gloo. NCCL and NVSHMEM cannot continue without a rank.
        PeerTimeout: a rank did not join.
        LimitReached: a rank has too few descriptors to watch its peers.
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
        # Prefix of this group's keys: a restarted job may find its predecessor's decisions in the same store.
        self._name = str(places[0].get("name"))
        self._watches: list[Watch | None] = []  # None for a rank on another host: only its silence shows

        def watch_all() -> dict[str, Any]:
            self._watches = [watch(p["pid"]) if p.get("where") == here["where"] else None for p in places]
            return {}

        all_or_none(rendezvous, watch_all, "watch its peers' processes", timeout_s)

    def survivors(self, timeout_s: float = 30.0) -> list[int]:
        """Replace the default process group by a group of the surviving ranks, in their old order.

        Collective over the live ranks. Call it after an op has failed on each of them and its buffers are closed. All
        other process groups are destroyed also. A rank of this host whose process ended is not waited for. The new
        group keeps the old timeout, and this object then describes the new group. A PeerTimeout is raised on every
        survivor; each then calls this again, as often as ranks die meanwhile.

        Args:
            timeout_s: seconds to wait for a rank that may be alive; a rank that stays silent for longer is left out.

        Returns:
            The survivors, by their ranks in the old group.

        Raises:
            RankExcluded: the others did not wait for this rank. It has no group any more and should exit.
            StoreLost: the process that served the store ended.
            PeerTimeout: a rank that had set its mark ended before the new group was made.
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
            # The first rank to finish decides for all: a delayed rank must not use a group that others gave up.
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
        """Return the survivors' old ranks, the same list on every rank."""
        size = len(self._watches)
        store.set(f"here/{self._rank}", "1")
        deadline = time.monotonic() + timeout_s
        missing = set(range(size))
        while missing and time.monotonic() < deadline and not store.check(["decision"]):
            missing = {r for r in missing if not (self._has_ended(r) or store.check([f"here/{r}"]))}
            time.sleep(_LOOK_EVERY_S)
        left = [r for r in range(size) if store.check([f"here/{r}"]) and not self._has_ended(r)]
        # The first rank to get here decides for all: ranks read the marks at different times and may see others.
        return json.loads(store.compare_set("decision", "", json.dumps(left)))

    def _has_ended(self, rank: int) -> bool:
        watched = self._watches[rank]
        return watched is not None and watched.has_ended()

    def _join(self, store: Store, left: list[int]) -> RuntimeError | None:
        """Make the new group. Return the error if it could not be made."""
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
