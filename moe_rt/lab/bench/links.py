"""Links of emulated nodes: bytes that a step sends over each, and the round-trip time over TCP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any

from moe_rt.config.topology import Topology
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.base import Step
from moe_rt.lab.bench.crossing import Rows, Unit, bytes_through, count_rows, least_us
from moe_rt.lab.bench.inputs import route
from moe_rt.lab.bench.world import TIMEOUT_S, World
from moe_rt.lab.cluster.cluster import own_traffic

MOST_INPUTS = 4  # each runs once through every contestant
SETTLE_S = 0.2  # acknowledgements arrive later than the data that they acknowledge


class Links:
    """Links of a case's nodes, and the inputs used for counting.

    Attributes:
        least_us: lower bound on a link's time per iteration; None without a rate limit.
    """

    def __init__(self, case: Case, seed: int, rotations: int) -> None:
        self._case = case
        self._inputs = range(min(MOST_INPUTS, rotations))
        self._rows: list[Rows] = [
            count_rows(case, [route(case, seed, rank, i) for rank in range(case.ranks)]) for i in self._inputs
        ]
        least = [us for rows in self._rows if (us := least_us(case, rows)) is not None]
        self.least_us = fmean(least) if least else None

    def count(self, world: World, step: Step, unit: Unit | None) -> dict[str, Any]:
        """Bytes of each node's link per iteration of a step, and the formula's. Collective, and not timed.

        Args:
            unit: the contestant sends a token's row once per distinct unit; None if unknown.
        """
        world.meet()
        time.sleep(SETTLE_S)
        before = own_traffic()
        world.meet()
        for i in self._inputs:
            step.run(i)
        world.meet()
        time.sleep(SETTLE_S)
        after = own_traffic()
        own = after.sent - before.sent, after.received - before.received
        ranks = [json.loads(text) for text in world.gather(json.dumps(own))]
        topology = self._case.topology
        first = [topology.ranks_of(node)[0] for node in range(topology.num_nodes)]
        sent, received = zip(*(ranks[rank] for rank in first), strict=True)
        return {"sent": self._mean(sent), "received": self._mean(received), "formula": self._formula(step, unit)}

    def _mean(self, totals: Sequence[int]) -> list[float]:
        return [total / len(self._inputs) for total in totals]

    def _formula(self, step: Step, unit: Unit | None) -> list[float] | None:
        if unit is None:
            return None
        times = 2 if step.phase == "forward+backward" else 1
        each = [bytes_through(self._case, rows, unit, times) for rows in self._rows]
        return [fmean(node.sent for node in nodes) for nodes in zip(*each, strict=True)]


TRIPS = 200
MESSAGE = bytes(64)


def round_trip_us(world: World, topology: Topology) -> float:
    """Median between the first rank and the first rank of the last node. Collective; no other rank may send
    meanwhile."""
    remote = topology.ranks_of(topology.num_nodes - 1)[0]
    with socket.create_server(("", 0), backlog=1) as server:
        server.settimeout(TIMEOUT_S)
        where = json.dumps([socket.gethostname(), server.getsockname()[1]])
        host, port = json.loads(world.gather(where)[remote])
        times = []
        if world.rank == 0:
            with socket.create_connection((host, port), TIMEOUT_S) as peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(TRIPS):
                    start = perf_counter_ns()
                    peer.sendall(MESSAGE)
                    _receive(peer)
                    times.append(perf_counter_ns() - start)
        elif world.rank == remote:
            peer, _ = server.accept()
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(TRIPS):
                    _receive(peer)
                    peer.sendall(MESSAGE)
    return float(world.gather(str(median(times) / 1e3 if times else 0.0))[0])


def _receive(peer: socket.socket) -> None:
    left = len(MESSAGE)
    while left:
        got = len(peer.recv(left))
        if not got:
            raise ConnectionResetError("got the end of a connection, expected a message")
        left -= got
