"""Run a command in a node. The command and all processes it started have ended when `run` returns or raises."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from moe_rt.errors import InvalidConfig
from moe_rt.lab.cluster.cluster import Cluster, refused, require_rights
from moe_rt.lab.testing.endings import ended_within
from moe_rt.lab.testing.programs import STARTER, wait

_GRACE_S, _LOOK_S = 5.0, 0.02
_PR_SET_PDEATHSIG = 1
# linux/sched.h: mounts, host name, IPC, process ids of children, network
_UTS = 0x0400_0000
_NAMESPACES = 0x0002_0000 | _UTS | 0x0800_0000 | 0x2000_0000 | 0x4000_0000


def run(cluster: Cluster, node: int, command: Sequence[str]) -> int:
    """Run the command in the node, in this directory, and return its exit status, or 128 + the signal that ended it.

    SIGINT of a terminal reaches the command by itself; SIGTERM and SIGHUP are forwarded. It then has 5 seconds to end.

    Raises:
        InvalidConfig: no such node exists, or this process lacks the rights.
        MissingPackage: a system tool is missing.
    """
    require_rights()  # without them the processes of a node are hidden, and every node would seem down
    init = cluster.init_process(node)
    try:
        mark = _make_mark(init)
    except OSError as error:
        raise InvalidConfig(refused("run", str(error))) from error

    def hand_on(number: int, frame: object) -> None:
        for pid in _marked(mark):
            _kill(pid, number)
        raise SystemExit(128 + number)

    inside = _entering(init, f"--uts=/proc/{os.getpid()}/fd/{mark}")
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hand_on) for number in handled}  # nohup has SIGHUP ignored
    process = None
    try:
        process = subprocess.Popen([*inside, *command], text=True)
        status = wait(process)
    except BaseException:
        deadline = time.monotonic() + _GRACE_S
        while _marked(mark) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        while left := _marked(mark):
            for pid in left:
                _kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)
        if process is not None:
            process.wait()
        os.close(mark)
    assert status is not None
    return status if status >= 0 else 128 - status


def in_node(cluster: Cluster, node: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` in the node for as long as the process that starts it lives.

    To end it, signal that process or take the cluster down. Otherwise processes that it started in turn may be left.

    Raises:
        InvalidConfig: no such node exists.
    """
    end_with_parent = ["setpriv", "--pdeathsig", "KILL"]
    return [*end_with_parent, *_entering(cluster.init_process(node), "--uts"), *end_with_parent, *command]


def fork_into(cluster: Cluster, node: int) -> int:
    """Fork a single-threaded process into the node. The child is entirely in the node and ends with this process.

    This process itself also enters the node's namespaces, except for its process id.

    Raises:
        InvalidConfig: no such node exists.
        OSError: the system refuses.
    """
    init = os.pidfd_open(cluster.init_process(node))
    try:
        _call("setns", init, _NAMESPACES)
    finally:
        os.close(init)
    starter = os.pidfd_open(os.getpid())  # its id has no meaning in the node
    child = os.fork()
    if child == 0:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if ended_within(starter, 0.0):  # the parent ended before that call
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(starter)
    return child


def _entering(init: int, uts: str) -> list[str]:
    """Prefix of a command that enters a node. It drops the starter's process id, which has no meaning there."""
    inside = ["nsenter", "--target", str(init), uts, "--mount", "--ipc", "--net", "--pid", "--"]
    return [*inside, "env", f"--unset={STARTER}", f"--chdir={Path.cwd()}"]


def _make_mark(init: int) -> int:
    """Open a new UTS namespace with the node's host name. Every process in it was started by one run.

    Processes pass the namespace on to everything that they start; they may change or lose an environment, session or
    parent.
    """
    here = os.open("/proc/thread-self/ns/uts", os.O_RDONLY)
    try:
        with open(f"/proc/{init}/ns/uts", "rb") as node:
            _call("setns", node.fileno(), _UTS)
        try:
            _call("unshare", _UTS)
            return os.open("/proc/thread-self/ns/uts", os.O_RDONLY)
        finally:
            _call("setns", here, _UTS)
    finally:
        os.close(here)


def _marked(mark: int) -> list[int]:
    """Processes in that namespace, including the nsenter that waits for the command."""
    found, space = [], os.fstat(mark).st_ino
    for path in Path("/proc").glob("[0-9]*/ns/uts"):
        with contextlib.suppress(OSError):  # it has ended
            if path.stat().st_ino == space:
                found.append(int(path.parts[2]))
    return found


def _call(name: str, *arguments: int) -> None:
    """Call the C library. Python has these functions only from 3.12."""
    if ctypes.CDLL(None, use_errno=True)[name](*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
