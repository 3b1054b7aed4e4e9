"""Ranks in emulated nodes, for cases as in support/ranks.py: nodes[n] ranks in node n."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from support.needs_nodes import new_cluster
from support.ranks import TELL_STACKS, ProcessRanks, _serve

from moe_rt.lab.cluster.cluster import Cluster
from moe_rt.lab.cluster.run import fork_into
from moe_rt.lab.testing import process_ranks
from moe_rt.lab.testing.channel import Channel
from moe_rt.memory.ucx import await_peers

_START_S = 600.0


class NodeRanks(ProcessRanks):
    """Ranks in emulated nodes, with a store in node 0; skips the test without the rights to make nodes."""

    heap = "ucx"

    def __init__(self, nodes: tuple[int, ...], rate: str | None = None, **environment: str) -> None:
        self.size = sum(nodes)
        self.node_of = [node for node, number in enumerate(nodes) for _ in range(number)]
        self.cluster = new_cluster(len(nodes), rate, name="ranks" + "x".join(map(str, nodes)))
        self._environment = environment
        self._ranks = process_ranks.ProcessRanks(in_server=True)
        self._hang, self._lives = False, 0
        try:
            self._start()
        except BaseException:
            self.cluster.down()
            raise

    def _start(self) -> None:
        if self.size not in self._ranks:  # first start, or all processes were killed after a hang
            self._ranks.start(self.size, _enter, self.cluster.name, 0, _serve_store, self.cluster.address(0))
            self._port = int(self._ranks.receive(self.size, _START_S))
        for rank, node in enumerate(self.node_of):
            serve = (rank, self.size, self._port, str(self._lives), self.cluster.address(0))
            self._ranks.start(rank, _enter, self.cluster.name, node, _serve_rank, self._environment, *serve)
        self.pids = [self._ranks.pid(rank) for rank in range(self.size)]
        self._lives += 1

    def restart(self) -> None:
        """Start new processes for all ranks, after some have died."""
        for rank in range(self.size):
            self._ranks.kill(rank)
        self._start()

    def close(self) -> None:
        try:
            for rank in range(self.size):
                self._ranks.hang_up(rank)
            for rank in range(self.size):
                self._ranks.await_end(rank, 20.0)
            self._ranks.close()
        finally:
            self.cluster.down()


def _serve_store(channel: Channel, address: str) -> None:
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    channel.send(str(store.port).encode())
    with contextlib.suppress(EOFError):
        channel.receive()


def _serve_rank(channel: Channel, environment: dict[str, str], *serve: Any) -> None:
    os.environ.update(environment)
    _serve(channel, *serve)
    await_peers()  # the exit of Python does this also: peers may still read


def _enter(channel: Channel, cluster: str, node: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run the work in a child process that is wholly in the node; both end together."""
    child = fork_into(Cluster(cluster), node)
    if child == 0:
        try:
            work(channel, *arguments)
        finally:
            os._exit(0)
    channel.close()
    signal.signal(TELL_STACKS, lambda number, frame: os.kill(child, number))
    os.waitpid(child, 0)
