"""A command in a node: it and whatever it has started are over when `run` returns, however it returns."""

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
from moe_rt.nodes.cluster import Cluster, refused, require_rights
from moe_rt.testing.endings import ended_within
from moe_rt.testing.programs import STARTER, wait

_GRACE_S, _LOOK_S = 5.0, 0.02
_PR_SET_PDEATHSIG = 1
# linux/sched.h: mounts, host name, IPC, process ids of children, network
_UTS = 0x0400_0000
_NAMESPACES = 0x0002_0000 | _UTS | 0x0800_0000 | 0x2000_0000 | 0x4000_0000


def run(cluster: Cluster, node: int, command: Sequence[str]) -> int:
    """Runs the command in the node, in this directory, and returns its exit status, or 128 + the signal that ended it.

    SIGINT of a terminal reaches the command by itself; SIGTERM and SIGHUP are handed on. It then has 5 seconds.

    Raises:
        InvalidConfig: there is no such node, or this process has not the rights.
        MissingPackage: a tool of the system is not here.
    """
    require_rights()  # or the processes of a node would be hidden from us, and no node be up
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
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hand_on) for number in heard}  # nohup has SIGHUP ignored
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
    """A command that runs `command` in the node, for as long as the process lives that starts it.

    That one is told to end it, or the cluster is taken down: what it has started in turn may be left otherwise.

    Raises:
        InvalidConfig: there is no such node.
    """
    end_with_parent = ["setpriv", "--pdeathsig", "KILL"]
    return [*end_with_parent, *_entering(cluster.init_process(node), "--uts"), *end_with_parent, *command]


def fork_into(cluster: Cluster, node: int) -> int:
    """As os.fork, of a process with one thread: the child is wholly in the node, and ends with this process.

    From now on this process is in the node, too, but for its process id.

    Raises:
        InvalidConfig: there is no such node.
        OSError: the system refuses.
    """
    init = os.pidfd_open(cluster.init_process(node))
    try:
        _call("setns", init, _NAMESPACES)
    finally:
        os.close(init)
    starter = os.pidfd_open(os.getpid())  # its id means nothing in the node
    child = os.fork()
    if child == 0:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if ended_within(starter, 0.0):  # before that call
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(starter)
    return child


def _entering(init: int, uts: str) -> list[str]:
    """How a command begins that enters a node. Process ids of the outside mean nothing there."""
    inside = ["nsenter", "--target", str(init), uts, "--mount", "--ipc", "--net", "--pid", "--"]
    return [*inside, "env", f"--unset={STARTER}", f"--chdir={Path.cwd()}"]


def _make_mark(init: int) -> int:
    """A namespace, open, with the node's host name: who is in it was started by one run, whatever has become of it.

    Processes pass theirs on to all that they start; an environment, a session or a parent they may change or lose.
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
    """Who is in that namespace, with the nsenter that waits for the command."""
    found, space = [], os.fstat(mark).st_ino
    for path in Path("/proc").glob("[0-9]*/ns/uts"):
        with contextlib.suppress(OSError):  # it has ended
            if path.stat().st_ino == space:
                found.append(int(path.parts[2]))
    return found


def _call(name: str, *arguments: int) -> None:
    """A call of the C library; Python has these from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True)[name](*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
