"""Emulated nodes: their separate and shared resources, the end of their commands, and their removal without traces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from nodes.commands import said, start
from support.needs_nodes import new_cluster

from moe_rt.cli import main
from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.lab.cluster import cluster as module
from moe_rt.lab.cluster.cluster import NETNS, Cluster, rate_in_bits
from moe_rt.lab.cluster.run import run

BYTES = 1 << 20
HANG_S = 600.0
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as s: s.sendall(bytes(int(sys.argv[2])))
"""
RECEIVE = """
import socket
with socket.create_server(("", 7000)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    print(sum(iter(lambda: len(connection.recv(1 << 16)), 0)))
"""
# The child has left the session and the process group, and has no parent.
DAEMON = "(setsid sh -c 'echo gone; trap \"\" TERM INT; sleep 1000' &) ; echo started; exec sleep 1000"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with new_cluster(2, "200mbit") as made:
        yield made


def traces(name: str) -> list[str]:
    """Return the system's traces of a cluster: namespaces, and processes that name it."""
    found = [path.name for path in NETNS.glob(f"{name}-*")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{name}-node" in path.read_text():
                found.append(path.read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def await_none(cluster: Cluster, node: int) -> None:
    deadline = time.monotonic() + HANG_S
    while left := list(cluster.processes(node)):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_a_node_has_its_own(cluster: Cluster) -> None:
    look = "hostname; cat /proc/sys/kernel/random/boot_id; cd /proc/self/ns; readlink net pid mnt uts ipc"
    of_init = look.replace("self", "1")  # a run has a separate namespace for the host name
    nodes = [said(cluster, node, "sh", "-c", of_init).splitlines() for node in range(2)]
    here = subprocess.run(["sh", "-c", look], check=True, capture_output=True, text=True).stdout.splitlines()
    assert [node[0] for node in nodes] == ["node0", "node1"]
    for mine, other, outside in zip(*nodes, here, strict=True):
        assert len({mine, other, outside}) == 3
    said(cluster, 0, "touch", "/dev/shm/of_node_0")
    assert said(cluster, 1, "ls", "-A", "/dev/shm") == ""
    assert not Path("/dev/shm/of_node_0").exists()


def test_commands_of_a_node_are_together(cluster: Cluster) -> None:
    """Commands of a node share process ids, boot id, /dev/shm and directory, which ranks with shared memory need."""
    look = "readlink /proc/self/ns/pid /proc/1/ns/pid; cat /proc/sys/kernel/random/boot_id; pwd; ls /dev/shm"
    assert said(cluster, 1, "sh", "-c", look) == said(cluster, 1, "sh", "-c", look)
    pid, *inside = said(cluster, 1, "sh", "-c", look).splitlines()
    assert {pid} == {inside[0]}
    assert str(Path.cwd()) in inside


def test_bytes_are_counted_by_name(cluster: Cluster) -> None:
    server = start(cluster, 1, sys.executable, "-c", RECEIVE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listens\n"
    before = [cluster.traffic(node) for node in range(2)]
    said(cluster, 0, sys.executable, "-c", SEND, "node1", str(BYTES))
    assert server.communicate(timeout=HANG_S)[0] == f"{BYTES}\n"
    after = [cluster.traffic(node) for node in range(2)]
    sent = after[0].sent - before[0].sent
    received = after[1].received - before[1].received
    assert BYTES < sent < 1.1 * BYTES
    assert BYTES < received < 1.1 * BYTES
    assert after[1].sent - before[1].sent < 0.2 * BYTES


def test_the_rate_is_that_of_both_ways(cluster: Cluster) -> None:
    for namespace, device in ((f"{cluster.name}-node1", "eth0"), (f"{cluster.name}-switch", "port1")):
        text = subprocess.check_output(["tc", "-n", namespace, "-json", "qdisc", "show", "dev", device])
        (queue,) = json.loads(text)
        assert (queue["kind"], queue["options"]["rate"]) == ("tbf", 200_000_000 // 8)


def test_there_is_no_way_out(cluster: Cluster) -> None:
    routes = said(cluster, 0, "ip", "route").splitlines()
    assert [route.split()[0] for route in routes] == ["10.78.0.0/24"]
    links = json.loads(said(cluster, 0, "ip", "-json", "link"))
    assert {link["ifname"] for link in links} == {"lo", "eth0"}


def test_a_cut_link_can_be_mended(cluster: Cluster) -> None:
    reach = "import socket\ntry: socket.create_connection(('node0', 7001), timeout={})\nexcept {}: print('{}')"
    refused = reach.format(60, "ConnectionRefusedError", "refused")  # no server listens
    assert said(cluster, 1, sys.executable, "-c", refused) == "refused"
    cluster.cut(1)
    try:
        process = start(cluster, 1, sys.executable, "-c", reach.format(0.3, "TimeoutError", "silence"))
        assert process.communicate(timeout=HANG_S)[0] == "silence\n"
    finally:
        cluster.mend(1)
    assert said(cluster, 1, sys.executable, "-c", refused) == "refused"


@pytest.mark.parametrize(("command", "status"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_a_status_comes_back(cluster: Cluster, command: str, status: int) -> None:
    assert start(cluster, 0, "sh", "-c", command).wait(HANG_S) == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_was_started_ends_with_the_run(cluster: Cluster, number: int) -> None:
    """All processes end with the run on a signal, also on Ctrl-C, which reaches the whole process group."""
    process = start(cluster, 0, "sh", "-c", DAEMON)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"started\n", "gone\n"}
    assert len(list(cluster.processes(0))) >= 2
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    status = process.wait(HANG_S)
    assert number == signal.SIGINT or status == 128 + number
    assert list(cluster.processes(0)) == []


@pytest.mark.parametrize("change", ["", "env -i", "unshare --pid --fork"])
def test_a_daemon_ends_with_a_run_that_ends(cluster: Cluster, tmp_path: Path, change: str) -> None:
    """A daemon ends with its run, although it changed its session, parent, environment or process ids."""
    gone = f'"{tmp_path / "gone"}"'
    daemon = DAEMON.replace("echo gone", f"echo gone; : > {gone}").replace("setsid", f"setsid {change}")
    daemon = daemon.replace("exec sleep 1000", f"until [ -e {gone} ]; do sleep 0.02; done")
    look = ["ip", "netns", "pids", f"{cluster.name}-node0"]
    before = subprocess.check_output(look)
    assert "gone" in said(cluster, 0, "sh", "-c", daemon)
    assert subprocess.check_output(look) == before


def test_a_run_gives_signals_back(cluster: Cluster) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run(cluster, 0, ["true"]) == 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_orphans_are_collected(cluster: Cluster) -> None:
    """The kernel reaps a node's orphans: no process in the node waits for them."""
    orphan = "pid=$(sh -c 'sleep 0.1 > /dev/null & echo $!'); "
    look = "for i in $(seq 1000); do [ -e /proc/$pid ] || { echo collected; exit; }; sleep 0.1; done"
    assert said(cluster, 0, "sh", "-c", orphan + look) == "collected"


def test_a_second_up_is_refused_and_changes_nothing(cluster: Cluster) -> None:
    with pytest.raises(InvalidConfig, match=f"moe-rt nodes down --cluster {cluster.name}"):
        cluster.up(2)
    assert cluster.num_nodes == 2
    assert said(cluster, 0, "hostname") == "node0"


def test_a_node_that_is_killed() -> None:
    """All processes of a killed node end, the other nodes continue, and `down` removes the rest."""
    with new_cluster(2, name="killed") as cluster:
        process = start(cluster, 0, "sh", "-c", "echo started; exec sleep 1000")
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        os.kill(cluster.init_process(0), signal.SIGKILL)
        assert process.wait(HANG_S) != 0
        with pytest.raises(InvalidConfig, match="got no node 0 that is up among 2 nodes"):
            cluster.init_process(0)
        assert said(cluster, 1, "hostname") == "node1"
    assert traces(cluster.name) == []


def test_up_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = new_cluster(1, name="fails")
    cluster.down()
    cluster.down()  # a second call is allowed
    add = Cluster._add_node

    def add_one(self: Cluster, node: int, *others: object) -> None:
        if node == 1:
            raise KeyboardInterrupt
        add(self, node, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Cluster, "_add_node", add_one)
    with pytest.raises(KeyboardInterrupt):
        cluster.up(2)
    assert traces(cluster.name) == []


def test_after_a_crash_down_clears_all() -> None:
    """`down` removes all that a killed `up` and a killed `run` leave."""
    cluster = new_cluster(1, name="crash")
    cluster.down()
    code = "import os, signal, sys; from moe_rt.lab.cluster.cluster import Cluster\nadd = Cluster._add_node\n"
    code += "Cluster._add_node = lambda self, n, *o: os.kill(0, signal.SIGKILL) if n else add(self, n, *o)\n"
    code += "Cluster(sys.argv[1]).up(2)"
    words = [sys.executable, "-c", code, cluster.name]
    assert subprocess.Popen(words, start_new_session=True).wait(HANG_S) == -signal.SIGKILL
    try:
        assert cluster.num_nodes == 1
        with pytest.raises(InvalidConfig, match="up, or a part of one"):
            cluster.up(2)
        process = start(cluster, 0, "sh", "-c", "echo started; exec sleep 1000")
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.kill()
        process.wait(HANG_S)
        assert list(cluster.processes(0)) != []
    finally:
        cluster.down()
    assert traces(cluster.name) == []


def test_commands() -> None:
    cluster = new_cluster(1, name="command")
    cluster.down()
    option = ["--cluster", cluster.name]

    def ask(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["nodes", *words])
        return result.exit_code, result.output

    assert ask("run", *option, "0", "--", "true")[0] == 1
    assert "got no node 0 that is up among no nodes" in ask("run", *option, "0", "--", "true")[1]
    try:
        assert ask("up", "2", *option) == (0, "node0  10.78.0.1\nnode1  10.78.0.2\n")
        assert ask("up", "2", *option)[0] == 1
        assert ask("run", *option, "1", "--", "sh", "-c", "exit 5")[0] == 5
    finally:
        assert ask("down", *option) == (0, "")
    assert ask("down", *option) == (0, "")
    assert traces(cluster.name) == []


def test_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    new_cluster(1, name="rights").down()
    drop = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", "--ambient-caps", "-all"]
    code = "from moe_rt.lab.cluster.cluster import Cluster; Cluster('norights').up(1)"
    done = subprocess.run([*drop, sys.executable, "-c", code], capture_output=True, text=True)
    assert "expected rights to make namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN)" in done.stderr
    assert traces("norights") == []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for act in (lambda: Cluster().up(2), Cluster().down, lambda: run(Cluster(), 0, ["true"])):
        with pytest.raises(InvalidConfig, match="expected root; sudo moe-rt nodes"):
            act()


def test_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda tool: None if tool == "ip" else tool)
    for act in (lambda: Cluster().up(2), lambda: run(Cluster(), 0, ["true"])):
        with pytest.raises(MissingPackage, match="got no program ip, expected one; apt-get install iproute2"):
            act()


@pytest.mark.parametrize("rate", ["", "fast", "0mbit", "10", "1.5gbit", "1gbit;"])
def test_odd_rates_are_refused(rate: str) -> None:
    with pytest.raises(InvalidConfig, match="rate: got"):
        rate_in_bits(rate)


def test_rates() -> None:
    assert [rate_in_bits(rate) for rate in ("64kbit", "200mbit", "10gbit")] == [64_000, 200_000_000, 10_000_000_000]


@pytest.mark.parametrize("name", ["", "A", "a-b", "a/..", "a" * 33])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="cluster: got the name"):
        Cluster(name)
