"""Facts that a process in a node can read about the node, and a command in a node that ends with its starter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.needs_nodes import new_cluster

from moe_rt.lab.cluster.cluster import Cluster, Traffic, own_traffic
from moe_rt.lab.cluster.run import in_node
from moe_rt.lab.testing.programs import STARTER

BYTES = 1 << 20
HANG_S = 600.0
RECEIVE = """
import socket
from moe_rt.lab.cluster.cluster import own_traffic
with socket.create_server(("", 7000)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    sum(iter(lambda: len(connection.recv(1 << 16)), 0))
own = own_traffic()
print(own.sent, own.received)
"""
SEND = f"import socket; socket.create_connection(('node1', 7000)).sendall(bytes({BYTES}))"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with new_cluster(2, name="inside") as made:
        yield made


def test_a_node_counts_its_own_bytes(cluster: Cluster) -> None:
    words = in_node(cluster, 1, [sys.executable, "-c", RECEIVE])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        subprocess.run(in_node(cluster, 0, [sys.executable, "-c", SEND]), check=True, timeout=HANG_S)
        own = Traffic(*map(int, server.communicate(timeout=HANG_S)[0].split()))
    outside = cluster.traffic(1)
    assert BYTES < own.received <= outside.received < 1.1 * BYTES
    assert own.sent <= outside.sent < 0.2 * BYTES


def test_outside_of_nodes_there_is_nothing_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_rt.lab.cluster.cluster.INTERFACE", "eth77")
    with pytest.raises(RuntimeError, match="got no interface eth77 here, expected a process in a node"):
        own_traffic()


def test_process_ids_of_the_outside_mean_nothing_there(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTER, "1")
    command = in_node(cluster, 0, ["sh", "-c", f"hostname; echo ${{{STARTER}-none}}"])
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout
    assert said.splitlines()[:2] == ["node0", "none"]
