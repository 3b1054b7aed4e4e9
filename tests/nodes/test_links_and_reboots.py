"""Links that are slow for a while, and nodes that are rebooted after they died."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs_nodes import new_cluster

from moe_rt.errors import InvalidConfig
from moe_rt.lab.cluster.cluster import Cluster
from moe_rt.lab.cluster.run import run


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with new_cluster(2, name="links") as made:
        yield made


def queues(cluster: Cluster) -> list[str]:
    """Return the queueing disciplines at both ends of node 1's link."""
    ends = ((f"{cluster.name}-node1", "eth0"), (f"{cluster.name}-switch", "port1"))
    return [
        subprocess.check_output(["tc", "-n", space, "qdisc", "show", "dev", device], text=True)
        for space, device in ends
    ]


def test_a_limit_that_comes_and_goes(cluster: Cluster) -> None:
    before = queues(cluster)
    cluster.limit(1, "5mbit", "1ms")
    assert all("rate 5Mbit" in queue and "lat 1ms" in queue for queue in queues(cluster))
    cluster.limit(1, "1mbit")
    assert all("rate 1Mbit" in queue and "lat 50ms" in queue for queue in queues(cluster))
    cluster.unlimit(1)
    assert queues(cluster) == before
    with pytest.raises(InvalidConfig, match="rate: got 'fast'"):
        cluster.limit(1, "fast")


def boot_id(cluster: Cluster, node: int) -> str:
    return Path(f"/proc/{cluster.init_process(node)}/root/proc/sys/kernel/random/boot_id").read_text()


def link_address(cluster: Cluster, node: int) -> str:
    shown = subprocess.check_output(["ip", "-n", f"{cluster.name}-node{node}", "link", "show", "eth0"], text=True)
    return shown.split("link/ether ")[1].split()[0]


@pytest.mark.parametrize("dies", [True, False])
def test_a_reboot(cluster: Cluster, dies: bool) -> None:
    """A rebooted node has a new boot id, and the other nodes reach it at the same link address."""
    address = link_address(cluster, 1)
    before, inits = boot_id(cluster, 1), [cluster.init_process(node) for node in range(2)]
    if dies:
        os.kill(inits[1], signal.SIGKILL)
    cluster.reboot(1)
    assert cluster.num_nodes == 2
    assert boot_id(cluster, 1) != before
    assert link_address(cluster, 1) == address != link_address(cluster, 0)
    assert cluster.init_process(0) == inits[0] != cluster.init_process(1)
    listen = "import socket; s = socket.create_server(('', 7001)); print('listens', flush=True); s.accept()"
    words = ["nsenter", f"--net=/run/netns/{cluster.name}-node1", "python3", "-c", listen]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        try:
            assert run(cluster, 0, ["python3", "-c", "import socket; socket.create_connection(('node1', 7001))"]) == 0
        finally:
            server.kill()


def test_a_reboot_while_somebody_holds_the_network_of_the_old_node(cluster: Cluster) -> None:
    """A reboot succeeds while the old network namespace is open, as it is for a while after its last process."""
    with Path(f"/run/netns/{cluster.name}-node1").open():
        cluster.reboot(1)


def test_nobody_has_to_collect_an_init_process(cluster: Cluster) -> None:
    """A reboot leaves no zombie: a program that makes many clusters would fill up with them."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text().split()
    cluster.reboot(1)
    assert set(children.read_text().split()) <= set(before)  # subprocess may have collected an older one
