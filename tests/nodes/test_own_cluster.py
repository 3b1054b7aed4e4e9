"""A process's own cluster disappears with all that runs there when the process ends for any reason."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.needs_nodes import new_cluster

from moe_rt.errors import InvalidConfig
from moe_rt.lab.cluster.cluster import NETNS, Cluster
from moe_rt.lab.cluster.own_cluster import OwnCluster

HANG_S = 800.0
# Make a cluster, start a process in a node, print the name of the cluster, and wait.
STARTS = """
import os, signal, subprocess, sys
from moe_rt.lab.cluster.own_cluster import OwnCluster
from moe_rt.lab.cluster.run import in_node
with_nodes = OwnCluster("own")
with_nodes.up(2)
started = subprocess.Popen(["setsid", "--fork", *in_node(with_nodes, 0, ["setsid", "sleep", "10000"])])
print(with_nodes.name, flush=True)
signal.pause()
"""
CHAOS = ["-m", "moe_rt", "chaos", "--nodes", "1,1", "--rounds", "1000", "--action", "order"]


@pytest.fixture(scope="module", autouse=True)
def rights() -> None:
    new_cluster(1, name="rights").down()


def await_no_trace(name: str) -> None:
    """Return when no namespace of the cluster and no process that keeps it exist."""
    deadline = time.monotonic() + HANG_S
    while list(NETNS.glob(f"{name}-*")) or keepers(name):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def keepers(name: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if "moe_rt.lab.cluster.own_cluster" in words and name in words:
            found.append(path.parts[2])
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_it_ends_with_its_process(number: int) -> None:
    """The cluster ends with its process, also if a terminal or `timeout` ends the whole process group."""
    words = ["env", "--default-signal=HUP", sys.executable, "-c", STARTS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], HANG_S)[0]
        name = process.stdout.readline().strip()
        assert len(list(NETNS.glob(f"{name}-*"))) == 3
        assert len(keepers(name)) == 1
        os.killpg(process.pid, number)
    await_no_trace(name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_chaos_leaves_nothing(number: int) -> None:
    words = ["env", "--default-signal=HUP", sys.executable, *CHAOS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], HANG_S)[0]  # a round is over
        assert list(NETNS.glob(f"chaos_{process.pid}-*"))
        process.send_signal(number)
    await_no_trace(f"chaos_{process.pid}")


def test_who_takes_it_down_needs_no_keeper() -> None:
    cluster = OwnCluster("own")
    cluster.up(1)
    assert len(keepers(cluster.name)) == 1
    cluster.down()
    assert keepers(cluster.name) == []
    await_no_trace(cluster.name)


def test_the_keeper_stays_until_all_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(cluster: Cluster) -> None:
        raise InvalidConfig("a process does not end")

    cluster = OwnCluster("own")
    cluster.up(1)
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "down", down)
        with pytest.raises(InvalidConfig, match="does not end"):
            cluster.down()
    assert len(keepers(cluster.name)) == 1
    cluster.down()
    await_no_trace(cluster.name)


def test_no_keeper_of_a_cluster_that_was_refused() -> None:
    with OwnCluster("own") as cluster:
        cluster.up(1)
        again = OwnCluster("own")
        with pytest.raises(InvalidConfig, match="that is up"):
            again.up(1)
        assert len(keepers(cluster.name)) == 1
        assert cluster.num_nodes == 1
