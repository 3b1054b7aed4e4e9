"""A command in a node: it and whatever it has started are over when `run` returns, however it returns."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from moe_rt.errors import InvalidConfig
from moe_rt.nodes.cluster import Cluster
from moe_rt.testing.programs import wait

_MARK = "MOE_RT_NODES_RUN"  # in the environment of all that a run starts, wherever it went from there
_GRACE_S, _LOOK_S = 5.0, 0.02
# linux/sched.h: mounts, host name, IPC, process ids of children, network
_NAMESPACES = 0x0002_0000 | 0x0400_0000 | 0x0800_0000 | 0x2000_0000 | 0x4000_0000


def run(cluster: Cluster, node: int, command: Sequence[str]) -> int:
    """Runs the command in the node, in this directory, and returns its exit status, or 128 + the signal that ended it.

    SIGINT of a terminal reaches the command by itself; SIGTERM is handed on. It then has 5 seconds.

    Raises:
        InvalidConfig: there is no such node.
    """
    mark = f"{_MARK}={secrets.token_hex(8)}"
    inside = ["nsenter", "--target", str(cluster.init_process(node)), "--mount", "--uts", "--ipc", "--net", "--pid"]
    process = subprocess.Popen([*inside, "--", "env", f"--chdir={Path.cwd()}", mark, *command], text=True)

    def hand_on(number: int, frame: object) -> None:
        for pid in _marked(cluster, node, mark):
            _kill(pid, number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        status = wait(process)
    except BaseException:
        deadline = time.monotonic() + _GRACE_S
        while _marked(cluster, node, mark) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        while left := _marked(cluster, node, mark):
            for pid in left:
                _kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)
        process.wait()
    assert status is not None
    return status if status >= 0 else 128 - status


def join(cluster: Cluster, node: int) -> None:
    """From now on this process, which must have one thread, is in the node, and the processes that it forks are wholly.

    Its own process id stays one of the outside.

    Raises:
        InvalidConfig: there is no such node.
        OSError: the system refuses.
    """
    init = os.pidfd_open(cluster.init_process(node))
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(init, _NAMESPACES) != 0:
            raise OSError(ctypes.get_errno(), f"cannot join node {node}")
    finally:
        os.close(init)


def _marked(cluster: Cluster, node: int, mark: str) -> list[int]:
    """What runs in the node with the mark in its environment; nothing where the node is gone."""
    found = []
    with contextlib.suppress(InvalidConfig):
        for pid in cluster.processes(node):
            with contextlib.suppress(OSError):
                if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
    return found


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
