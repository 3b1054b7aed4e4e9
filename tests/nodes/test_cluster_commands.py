"""The system's commands that make, change and remove a cluster, in order, on a system that only notes them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt.errors import InvalidConfig
from moe_rt.lab.cluster import cluster as module
from moe_rt.lab.cluster import own_cluster
from moe_rt.lab.cluster.cluster import Cluster, Traffic


class System:
    """Namespaces by name with the ids of their processes, and what has been asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.processes = directory, dict[str, list[int]]()
        self.asked: list[str] = []
        self.refuses = "nothing"
        self.says, self.now, self.endures = "up\n", 0.0, 1

    def run(self, words: list[str], **how: Any) -> Any:
        assert how == {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        line = " ".join(words)
        if line.startswith("ip netns pids"):
            return SimpleNamespace(returncode=0, stdout=" ".join(map(str, self.processes.get(words[3], []))) + "\n")
        self.asked.append(line)
        if self.refuses in line:
            return SimpleNamespace(returncode=1, stderr="  not\npermitted \n", stdout="")
        if line.startswith("ip netns add"):
            (self.directory / words[3]).touch()
        if line.startswith("ip netns delete"):
            (self.directory / words[3]).unlink()
        counters = [{"stats64": {"tx": {"bytes": 70}, "rx": {"bytes": 9}}}]
        return SimpleNamespace(returncode=0, stderr="", stdout=json.dumps(counters))

    def start(self, words: list[str], **how: Any) -> Any:
        head, (script, name, host, hosts) = words[: words.index("-c") + 1], words[words.index("-c") + 1 :]
        assert "exec env --ignore-signal=CHLD sleep infinity" in script
        self.asked.append(" ".join([*head, name, host, hosts]))
        return SimpleNamespace(stdout=io.StringIO(self.says), stderr=io.StringIO("no\n rights"), wait=lambda: 0)

    def kill(self, pid: int, number: int) -> None:
        self.asked.append(f"kill {pid} {number}")
        self.endures -= 1
        if self.endures == 0:
            self.processes = {name: [p for p in pids if p != pid] for name, pids in self.processes.items()}
            raise ProcessLookupError

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> System:
    system = System(tmp_path)
    monkeypatch.setattr(module, "NETNS", tmp_path)
    monkeypatch.setattr(module, "require_rights", lambda: system.asked.append("rights"))
    monkeypatch.setattr(module.subprocess, "run", system.run)
    monkeypatch.setattr(module.subprocess, "Popen", system.start)
    monkeypatch.setattr(module.os, "kill", system.kill)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: system.now, sleep=system.sleep))
    return system


def node(number: int, hosts: str, *queues: str) -> list[str]:
    name, port = f"c-node{number}", f"port{number}"
    return [
        f"ip netns add {name}",
        f"ip -n c-switch link add {port} type veth peer name eth0 address 02:00:00:00:00:{number + 1:02x} netns {name}",
        f"ip -n c-switch link set {port} master bridge up",
        f"ip -n {name} link set lo up",
        f"ip -n {name} link set eth0 up",
        f"ip -n {name} address add 10.78.0.{number + 1}/24 dev eth0",
        *(f"tc -n {end} qdisc replace dev {device} root tbf {queue}" for queue in queues
          for end, device in ((name, "eth0"), ("c-switch", port))),
        f"setsid --fork ip netns exec {name} unshare --mount --pid --uts --ipc --fork --kill-child --mount-proc "
        f"sh -c init node{number} {hosts}",
    ]  # fmt: skip


HOSTS = "127.0.0.1 localhost\\n10.78.0.1 node0\\n10.78.0.2 node1\\n"
BRIDGE = ["rights", "ip netns add c-switch", "ip -n c-switch link add bridge up type bridge"]


@pytest.mark.parametrize(("rate", "queues"), [(None, []), ("1gbit", ["rate 1000000000bit burst 262144 latency 50ms"])])
def test_up_and_down(system: System, rate: str | None, queues: list[str]) -> None:
    """A limit from the begin allows bursts of 256 KiB. Processes end before their namespace is removed."""
    cluster = Cluster("c")
    with cluster as same:
        assert same is cluster
        cluster.up(2, rate)
        assert cluster.num_nodes == 2
        assert system.asked == [*BRIDGE, *node(0, HOSTS, *queues), *node(1, HOSTS, *queues)]
        system.asked.clear()
        system.processes = {"c-node0": [11], "c-switch": []}
    removed = {f"ip netns delete c-node{number}" for number in range(2)}
    assert system.asked[:2] == ["rights", f"kill 11 {signal.SIGKILL}"]
    assert set(system.asked[2:4]) == removed
    assert system.asked[4:] == ["ip netns delete c-switch"]
    assert cluster.num_nodes == 0


def test_one_that_fails_is_taken_away(system: System) -> None:
    system.refuses = "c-node1 link set eth0"
    says = "ip -n c-node1 link set eth0 up: got 'not permitted', expected rights to make namespaces"
    with pytest.raises(InvalidConfig, match=says):
        Cluster("c").up(2)
    assert list(system.directory.iterdir()) == []
    system.refuses, system.says = "nothing", ""
    with pytest.raises(InvalidConfig, match="nodes: unshare: got 'no rights', expected rights"):
        Cluster("c").up(1)
    assert list(system.directory.iterdir()) == []


@pytest.mark.parametrize(("number", "right"), [(0, False), (1, True), (64, True), (65, False)])
def test_numbers_of_nodes(system: System, number: int, right: bool) -> None:
    if right:
        Cluster("c").up(number)
        assert len(list(system.directory.iterdir())) == number + 1
        return
    with pytest.raises(InvalidConfig, match=f"nodes: got {number}, expected 1 to 64"):
        Cluster("c").up(number)
    assert system.asked == ["rights"]


@pytest.mark.parametrize(("name", "how"), [("moe_rt", ""), ("c", " --cluster c")])
def test_one_that_is_up_says_how_to_end_it(system: System, name: str, how: str) -> None:
    (system.directory / f"{name}-node0").touch()
    with pytest.raises(InvalidConfig, match=rf"a cluster {name} that is up.*; moe-rt nodes down{how} \("):
        Cluster(name).up(1)


def test_others_of_similar_names_stay(system: System) -> None:
    for name in ("c-node1", "c-node12", "c-switch", "c-node", "c-switch2", "cc-node1", "c-nodex"):
        (system.directory / name).touch()
    assert Cluster("c").num_nodes == 2
    Cluster("c").down()
    assert {path.name for path in system.directory.iterdir()} == {"c-node", "c-switch2", "cc-node1", "c-nodex"}


def test_links_change(system: System) -> None:
    """A limit that comes later allows few packets, so that it takes effect immediately."""
    cluster = Cluster("c")
    cluster.limit(1, "5mbit")
    cluster.limit(1, "64kbit", "1ms")
    cluster.unlimit(1)
    cluster.cut(1)
    cluster.mend(1)
    assert cluster.traffic(1) == Traffic(sent=70, received=9)
    ends = (("c-node1", "eth0"), ("c-switch", "port1"))
    queues = ("rate 5000000bit burst 8192 latency 50ms", "rate 64000bit burst 8192 latency 1ms")
    assert system.asked == [
        *(f"tc -n {end} qdisc replace dev {device} root tbf {queue}" for queue in queues for end, device in ends),
        *(f"tc -n {end} qdisc delete dev {device} root" for end, device in ends),
        "ip -n c-switch link set port1 nomaster",
        "ip -n c-switch link set port1 master bridge",
        "ip -n c-node1 -json -statistics link show eth0",
    ]


def test_a_reboot_removes_the_link_first(system: System) -> None:
    cluster = Cluster("c")
    cluster.up(2)
    system.asked.clear()
    cluster.reboot(1)
    first = ["ip -n c-switch link delete port1", "ip netns delete c-node1"]
    assert system.asked == [*first, *node(1, HOSTS)]


@pytest.mark.parametrize("endures", [1, 3])
def test_processes_are_killed_until_none_is_left(system: System, endures: int) -> None:
    (system.directory / "c-node0").touch()
    system.processes, system.endures = {"c-node0": [7]}, endures
    Cluster("c").down()
    assert system.asked == ["rights", *[f"kill 7 {signal.SIGKILL}"] * endures, "ip netns delete c-node0"]


def test_processes_that_do_not_end_are_named(system: System) -> None:
    (system.directory / "c-node0").touch()
    system.processes, system.endures = {"c-node0": [7, 8]}, -1
    with pytest.raises(InvalidConfig, match=r"nodes: got processes \[7, 8\] that do not end, expected none"):
        Cluster("c").down()
    assert "ip netns delete c-node0" not in system.asked


def test_a_keeper_watches_this_process_from_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is of this process, and is closed here."""
    given: list[Any] = []
    monkeypatch.setattr(own_cluster.os, "pidfd_open", lambda pid: given.append(pid) or os.open("/dev/null", 0))
    monkeypatch.setattr(own_cluster.subprocess, "Popen", lambda words, **how: given.append((words, how)))
    own_cluster._start_keeper("c_1")
    pid, (words, how) = given
    (passed,) = how["pass_fds"]
    assert pid == os.getpid()
    assert words[1:] == ["-m", "moe_rt.lab.cluster.own_cluster", "c_1", str(passed)]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    assert how == {**quiet, "start_new_session": True, "pass_fds": [passed]}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(passed)
