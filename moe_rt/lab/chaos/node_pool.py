"""Ranks of trials on emulated nodes. Faults of a node or of its link affect its ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_rt.lab.chaos.rank_pool import STORE, RankPool
from moe_rt.lab.cluster.cluster import Cluster
from moe_rt.lab.cluster.own_cluster import OwnCluster
from moe_rt.lab.cluster.run import fork_into
from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.forking import Work
from moe_rt.memory import ucx

_LOOK_S = 0.001


class NodePool(RankPool):
    """Node n of a cluster holds as many ranks as the n-th number says. One further node holds the store for the
    rendezvous.

    Raises:
        InvalidConfig, MissingPackage: as in `Cluster.up`; or UCX is missing, which every rank would report.
    """

    remote = True

    def __init__(self, nodes: Sequence[int]) -> None:
        ucx.library()
        self.nodes = tuple(nodes)
        self.node_of = [node for node, number in enumerate(nodes) for _ in range(number)]
        self.cluster = OwnCluster("chaos")
        self.cluster.up(len(nodes) + 1)
        try:
            super().__init__(len(self.node_of), self.cluster.address(len(nodes)))
        except BaseException:
            self.cluster.down()
            raise

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, at in enumerate(self.node_of) if at == node]

    def start(self, rank: int, work: Work, *arguments: Any) -> None:
        """Start a process here that starts the rank in its node, and ends with it."""
        node = len(self.nodes) if rank == STORE else self.node_of[rank]
        super().start(rank, _in_node, self.cluster.name, node, work, *arguments)

    def pid(self, rank: int) -> int:
        """Id, on this host, of the rank itself.

        Raises:
            ProcessLookupError: it has ended.
        """
        starter = super().pid(rank)
        while not self.await_end(rank, 0.0):
            with suppress(FileNotFoundError):
                children = Path(f"/proc/{starter}/task/{starter}/children").read_text().split()
                if children:
                    return int(children[0])
            time.sleep(_LOOK_S)
        raise ProcessLookupError

    def send_signal(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid(rank), number)

    def stopped(self, rank: int) -> bool:
        with suppress(ProcessLookupError, FileNotFoundError):
            return super().stopped(rank)
        return False

    def kept(self) -> dict[str, int]:
        """Count the store's keys of meetings that have ended. Unlike on one host, no rank is killed in a meeting."""
        return {"store keys": self.keys_left()}

    def kill_node(self, node: int) -> None:
        """Kill the node's init process, and with it all processes of the node."""
        os.kill(self.cluster.init_process(node), signal.SIGKILL)

    def close(self) -> None:
        """End all ranks, and take the cluster down."""
        try:
            super().close()
        finally:
            self.cluster.down()


def _in_node(channel: Channel, cluster: str, node: int, work: Work, *arguments: Any) -> object:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = fork_into(Cluster(cluster), node)
    if child == 0:
        return work(channel, *arguments)  # `forking.fork` ends this process as well
    channel.close()
    os.waitpid(child, 0)
    return None
