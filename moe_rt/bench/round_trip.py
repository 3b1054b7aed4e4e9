"""Round-trip time of a message between two nodes over plain TCP: a lower bound for any op between them."""

from __future__ import annotations

import json
import socket
from statistics import median
from time import perf_counter_ns

from moe_rt.bench.world import TIMEOUT_S, World
from moe_rt.config.topology import Topology

TRIPS = 200
MESSAGE = bytes(64)


def round_trip_us(world: World, topology: Topology) -> float:
    """Median between the first rank and the first rank of the last node. Collective; no other rank may send
    meanwhile."""
    far = topology.ranks_of(topology.num_nodes - 1)[0]
    with socket.create_server(("", 0), backlog=1) as server:
        server.settimeout(TIMEOUT_S)
        where = json.dumps([socket.gethostname(), server.getsockname()[1]])
        host, port = json.loads(world.gather(where)[far])
        times = []
        if world.rank == 0:
            with socket.create_connection((host, port), TIMEOUT_S) as peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(TRIPS):
                    start = perf_counter_ns()
                    peer.sendall(MESSAGE)
                    _receive(peer)
                    times.append(perf_counter_ns() - start)
        elif world.rank == far:
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
