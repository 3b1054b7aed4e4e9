"""A cluster of nodes on this machine: network namespaces around a bridge, each kept open by an init process.

A node has a network interface eth0 at 10.78.0.<number + 1>; separate namespaces for processes, mounts, the host name
and IPC; its own /dev/shm and boot id; and the names of all nodes in /etc/hosts. The bridge is also in a namespace, so
nodes have no route to the outside, and a cluster is gone once its namespaces are. No state is kept in files: the
cluster is read from the system by its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_rt.errors import InvalidConfig, MissingPackage

NETNS = Path("/run/netns")  # iproute2's named namespaces
MOST_NODES = 64
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_RATE = re.compile(r"([1-9]\d{0,5})(k|m|g)bit")
_BITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_BURST_BYTES, _QUEUE = 256 << 10, "50ms"
_SMALL_BURST_BYTES = 8 << 10  # a few packets: a short limit must take effect immediately
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_END_S, _LOOK_S = 10.0, 0.01
# `Cluster.up` reads the line "up". Because SIGCHLD is ignored, the kernel reaps processes whose parents have ended.
_INIT = """set -e
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cd /dev/shm
cat /proc/sys/kernel/random/uuid > boot_id
printf '%b' "$2" > hosts
mount --bind boot_id /proc/sys/kernel/random/boot_id
mount --bind hosts /etc/hosts
rm boot_id hosts
cd /
echo "$1" > /proc/sys/kernel/hostname
echo up
exec env --ignore-signal=CHLD sleep infinity > /dev/null 2>&1"""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a node's interface has sent and received since the node was created, including packet headers."""

    sent: int
    received: int


def rate_in_bits(rate: str) -> int:
    """Bits per second of a rate in tc's notation, such as 200mbit.

    Raises:
        InvalidConfig: it is no such rate.
    """
    match = _RATE.fullmatch(rate)
    if match is None:
        raise InvalidConfig(f"rate: got {rate!r}, expected a number with kbit, mbit or gbit, such as 200mbit")
    return int(match[1]) * _BITS[match[2]]


class Cluster:
    """A cluster by name; objects with the same name share one cluster.

    Raises:
        InvalidConfig: the name has characters other than a-z, 0-9 and _.
    """

    def __init__(self, name: str = "moe_rt") -> None:
        if not _NAME.fullmatch(name):
            raise InvalidConfig(f"cluster: got the name {name!r}, expected up to 32 of a-z, 0-9 and _, first a letter")
        self.name = name
        self._switch = f"{name}-switch"

    def up(self, num_nodes: int, rate: str | None = None) -> None:
        """Create the nodes. If it raises, nothing of them is left.

        Args:
            rate: send and receive limit of each node, such as "1gbit"; None for no limit.

        Raises:
            InvalidConfig: this process lacks the rights, the cluster exists already, or the sizes are invalid.
            MissingPackage: a system tool is missing.
        """
        require_rights()
        if not 1 <= num_nodes <= MOST_NODES:
            raise InvalidConfig(f"nodes: got {num_nodes}, expected 1 to {MOST_NODES}")
        bits = None if rate is None else rate_in_bits(rate)
        if self._namespaces():
            how = "" if self.name == "moe_rt" else f" --cluster {self.name}"
            raise InvalidConfig(
                f"nodes: got a cluster {self.name} that is up, or a part of one, expected none; moe-rt nodes down{how}"
            )
        _say(f"ip netns add {self._switch}")  # of two concurrent calls, one fails here
        try:
            _say(f"ip -n {self._switch} link add bridge up type bridge")
            for node in range(num_nodes):
                self._add_node(node, num_nodes, bits)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End all processes of all nodes and remove the nodes. None, or parts of some, may exist.

        Raises:
            InvalidConfig: this process lacks the rights, or a process could not be ended.
            MissingPackage: a system tool is missing.
        """
        require_rights()
        _take_away(self._namespaces())

    def reboot(self, node: int) -> None:
        """End all processes of a node, which may have died, and create it again with a new boot id and no limit."""
        num_nodes = self.num_nodes
        _say(f"ip -n {self._switch} link delete port{node}")  # deleting the node would delete it, but later
        _take_away([f"{self.name}-node{node}"])
        self._add_node(node, num_nodes, None)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    @property
    def num_nodes(self) -> int:
        return len(self._namespaces()) - ((NETNS / self._switch).exists())

    def address(self, node: int) -> str:
        """Address at which other nodes reach this node."""
        return f"10.78.0.{node + 1}"

    def init_process(self, node: int) -> int:
        """Id, outside, of the process whose namespaces are the node's. All processes of the node end with it.

        Raises:
            InvalidConfig: no such node exists, or its init process was killed.
        """
        for pid in _processes_of(f"{self.name}-node{node}"):
            if _ids_of(pid)[1:] == [1]:
                return pid
        what = f"{self.num_nodes} nodes" if self.num_nodes > 0 else "no nodes"
        raise InvalidConfig(f"nodes: got no node {node} that is up among {what}, expected one; moe-rt nodes up 2")

    def processes(self, node: int) -> Iterator[int]:
        """Ids, outside, of a node's processes other than its init process."""
        init = self.init_process(node)
        space = os.stat(f"/proc/{init}/ns/pid").st_ino
        for pid in _processes_of(f"{self.name}-node{node}"):
            with contextlib.suppress(OSError):
                if pid != init and os.stat(f"/proc/{pid}/ns/pid").st_ino == space:
                    yield pid

    def traffic(self, node: int) -> Traffic:
        """Bytes that have passed through a node's interface so far."""
        counters = json.loads(_say(f"ip -n {self.name}-node{node} -json -statistics link show eth0"))[0]["stats64"]
        return Traffic(sent=counters["tx"]["bytes"], received=counters["rx"]["bytes"])

    def cut(self, node: int) -> None:
        """Take down the link of a node, as if its cable were pulled: no peer is notified."""
        _say(f"ip -n {self._switch} link set port{node} nomaster")

    def mend(self, node: int) -> None:
        """Undo `cut`."""
        _say(f"ip -n {self._switch} link set port{node} master bridge")

    def limit(self, node: int, rate: str, queue: str = _QUEUE) -> None:
        """Limit a node's sending and receiving from now on. Packets queued for longer than `queue` are dropped.

        Raises:
            InvalidConfig: it is no such rate.
        """
        self._shape(node, rate_in_bits(rate), queue)

    def unlimit(self, node: int) -> None:
        """Undo `limit`."""
        for namespace, device in self._ends(node):
            _say(f"tc -n {namespace} qdisc delete dev {device} root")

    def _add_node(self, node: int, num_nodes: int, bits: int | None) -> None:
        name, port = f"{self.name}-node{node}", f"port{node}"
        _say(f"ip netns add {name}")
        # Keep the address after `reboot`: peers cache it for a minute.
        address = f"02:00:00:00:00:{node + 1:02x}"
        _say(f"ip -n {self._switch} link add {port} type veth peer name eth0 address {address} netns {name}")
        _say(f"ip -n {self._switch} link set {port} master bridge up")
        _say(f"ip -n {name} link set lo up")
        _say(f"ip -n {name} link set eth0 up")
        _say(f"ip -n {name} address add {self.address(node)}/24 dev eth0")
        if bits is not None:
            self._shape(node, bits, _QUEUE, _BURST_BYTES)
        hosts = "127.0.0.1 localhost\\n" + "".join(f"{self.address(n)} node{n}\\n" for n in range(num_nodes))
        unshare = "unshare --mount --pid --uts --ipc --fork --kill-child --mount-proc"
        init = subprocess.Popen(
            # A separate session keeps Ctrl-C away from it, and --fork leaves nothing to reap here.
            [*f"setsid --fork ip netns exec {name} {unshare} sh -c".split(), _INIT, "init", f"node{node}", hosts],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert init.stdout is not None
        assert init.stderr is not None
        if init.stdout.readline() != "up\n":
            raise InvalidConfig(refused("unshare", init.stderr.read()))
        init.stdout.close()
        init.stderr.close()
        init.wait()

    def _shape(self, node: int, bits: int, queue: str, burst: int = _SMALL_BURST_BYTES) -> None:
        for namespace, device in self._ends(node):
            _say(f"tc -n {namespace} qdisc replace dev {device} root tbf rate {bits}bit burst {burst} latency {queue}")

    def _ends(self, node: int) -> list[tuple[str, str]]:
        """Ends of a node's link. A queue shapes what enters an end: at one, the node's sending; at the other, its
        receiving."""
        return [(f"{self.name}-node{node}", "eth0"), (self._switch, f"port{node}")]

    def _namespaces(self) -> list[str]:
        """Namespaces of this cluster: nodes first, in no order."""
        of_this = re.compile(rf"{self.name}-(node\d+|switch)")
        names = [path.name for path in NETNS.glob(f"{self.name}-*") if of_this.fullmatch(path.name)]
        return sorted(names, key=lambda name: name == self._switch)


def require_rights() -> None:
    """Raise the errors of `Cluster.up` if this process cannot make a cluster."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise MissingPackage(f"nodes: got no program {tool}, expected one; apt-get install {package}")
    if os.geteuid() != 0:
        raise InvalidConfig("nodes: got a user without rights to make namespaces, expected root; sudo moe-rt nodes ...")


def _say(command: str) -> str:
    """Run a command and return its output. If it fails, the error quotes its stderr."""
    done = subprocess.run(command.split(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise InvalidConfig(refused(command, done.stderr))
    return done.stdout


def refused(command: str, why: str) -> str:
    """Message for an operation that the system refused."""
    got = " ".join(why.split()) or "nothing on stderr"
    return f"nodes: {command}: got {got!r}, expected rights to make namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN)"


def _take_away(namespaces: list[str]) -> None:
    """Delete namespaces after ending all processes in them."""
    deadline = time.monotonic() + _END_S
    while processes := [pid for namespace in namespaces for pid in _processes_of(namespace)]:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise InvalidConfig(f"nodes: got processes {processes} that do not end, expected none")
        time.sleep(_LOOK_S)
    for namespace in namespaces:
        _say(f"ip netns delete {namespace}")


def _processes_of(namespace: str) -> list[int]:
    """Processes in a network namespace, including the process that waits for a node's init process."""
    with contextlib.suppress(InvalidConfig):  # no such namespace
        return [int(pid) for pid in _say(f"ip netns pids {namespace}").split()]
    return []


def _ids_of(pid: int) -> list[int]:
    """A process's ids in its process-id namespaces, from here inwards; empty if it has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return [int(word) for word in status.split("NSpid:")[1].splitlines()[0].split()]
    return []


INTERFACE = "eth0"  # name on every node


def own_traffic() -> Traffic:
    """Bytes through the interface of the node that this process is in; `Cluster.traffic` reads the same from
    outside."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            received, sent = (int(numbers.split()[column]) for column in (0, 8))
            return Traffic(sent=sent, received=received)
    raise RuntimeError(f"got no interface {INTERFACE} here, expected a process in a node")
