"""Picks TCP ports for programs that take a port number instead of a socket."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from moe_rt.errors import LimitReached

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 1024, 65535  # ports below 1024 need root


def free_ports(number: int = 1) -> int:
    """Return the first of consecutive ports that are free on every address of this host.

    The kernel gives none of them to a socket that asks for any port: they are outside its ephemeral range. A port found
    by `bind(0)` is inside, so any connection may get it before a program binds it. The run starts at random, so that
    programs that pick at the same time do not pick the same.

    Args:
        number: number of ports; some programs also bind the ports that follow the one they are given.

    Raises:
        LimitReached: no such run of ports is free.
    """
    starts = [start for low, high in _ranges(number) for start in range(low, high - number + 2)]
    for start in random.sample(starts, len(starts)):
        if _are_free(range(start, start + number)):
            return start
    raise LimitReached(f"TCP ports: got no run of {number} free ones, expected one between {LOWEST} and {HIGHEST}")


def _ranges(number: int) -> list[tuple[int, int]]:
    """Return first and last port of each range outside the ephemeral one; all ports if none has enough of them."""
    first, last = (int(word) for word in EPHEMERAL.read_text().split())
    outside = [(LOWEST, first - 1), (last + 1, HIGHEST)]
    return [(low, high) for low, high in outside if high - low + 1 >= number] or [(LOWEST, HIGHEST)]


def _are_free(ports: range) -> bool:
    families = [socket.AF_INET, *([socket.AF_INET6] if socket.has_dualstack_ipv6() else [])]
    with ExitStack() as sockets:
        try:
            for port, family in product(ports, families):
                sockets.enter_context(socket.create_server(("", port), family=family))
        except OSError:
            return False
    return True
