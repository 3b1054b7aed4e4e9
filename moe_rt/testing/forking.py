"""Processes by fork, in milliseconds: from this process, or from a server that has imported torch and never used it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from moe_rt.testing.channel import Channel
from moe_rt.testing.endings import end_with

Work = Callable[..., object]
_PRELOAD = ("torch", "torch.distributed", "moe_rt")
_MOST_REQUEST = 1 << 16  # bytes


@dataclass(frozen=True)
class Forked:
    """A process by its id and by a descriptor, which means the same process for as long as it is open."""

    pid: int
    pidfd: int
    own: bool  # a child of this process, which must collect it

    def signal(self, number: int) -> None:
        """Of a process that has ended this does nothing."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Also while it is not collected; waits for it so long."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))

    def kill(self) -> None:
        """Ends the process, whatever it does, stopped or not, and forgets it."""
        self.signal(signal.SIGKILL)
        if self.own:
            os.waitpid(self.pid, 0)
        else:
            self.has_ended(float(1 << 20))
        os.close(self.pidfd)


class Closes(Protocol):
    def close(self) -> object:
        """Lets go of a descriptor."""
        ...


def fork(work: Work, arguments: Iterable[Any], end: Channel, others: Iterable[Closes]) -> Forked:
    """Forks this process; the new one runs work(end, *arguments) without `others`, which it would hold open."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the new process would write it, too
    starter, pid = os.getpid(), os.fork()
    if pid == 0:
        status = 1
        try:
            end_with(starter)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # handlers are the parent's, too
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for other in others:
                other.close()
            work(end, *arguments)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)  # the parent's frames and exit handlers are not ours to run
    return Forked(pid, os.pidfd_open(pid), own=True)


class ForkServer:
    """A process that forks others for this one, which may have threads and have used torch; they end with it."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "moe_rt.testing.forking", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )

    def fork(self, work: Work, arguments: Iterable[Any], end: Channel) -> Forked:
        """A process that runs work(end, *arguments); `work` is found by its name, arguments are what JSON can say.

        Raises:
            ValueError: `work` is no function of a module.
            RuntimeError: the server has ended; what it said is on stderr.
        """
        if "<" in work.__qualname__:
            raise ValueError(f"work: got {work.__qualname__}, expected a function of a module")
        request = {
            "work": [work.__module__, work.__qualname__],
            "arguments": list(arguments),
            "path": sys.path,
            "directory": os.getcwd(),
        }
        try:
            socket.send_fds(self._link, [json.dumps(request).encode()], [end.fileno()])
            pid, (pidfd,), _, _ = socket.recv_fds(self._link, 64, 1)
        except (OSError, ValueError) as error:
            raise RuntimeError("the fork server: got its end, expected a process") from error
        return Forked(int(pid), pidfd, own=False)

    def close(self) -> None:
        """Ends the server, and whom it has forked."""
        self._link.close()
        self._process.wait()


def _serve(link: socket.socket) -> None:
    """Forks on request and collects who has ended, until the other end is closed, by whatever end of its process."""
    children: dict[int, Forked] = {}
    while (request := _next_request(link, children)) is not None:
        order, end = request
        child = fork(_run, [order, children], end, [link])
        end.close()
        children[child.pidfd] = child
        socket.send_fds(link, [str(child.pid).encode()], [child.pidfd])


def _next_request(link: socket.socket, children: dict[int, Forked]) -> tuple[dict[str, Any], Channel] | None:
    poll = select.poll()
    for descriptor in (link.fileno(), *children):
        poll.register(descriptor, select.POLLIN)
    ready: list[int] = []
    while link.fileno() not in ready:
        ready = [descriptor for descriptor, _ in poll.poll()]
        for pidfd in ready:
            if pidfd in children:
                poll.unregister(pidfd)
                children.pop(pidfd).kill()
    text, descriptors, _, _ = socket.recv_fds(link, _MOST_REQUEST, 1)
    return (json.loads(text), Channel.of(descriptors[0])) if text else None


def _run(end: Channel, order: dict[str, Any], siblings: dict[int, Forked]) -> None:
    for pidfd in siblings:
        os.close(pidfd)
    sys.path[:] = order["path"]
    os.chdir(order["directory"])
    module, name = order["work"]
    work: Any = importlib.import_module(module)
    for part in name.split("."):
        work = getattr(work, part)
    work(end, *order["arguments"])


if __name__ == "__main__":
    for preloaded in _PRELOAD:
        importlib.import_module(preloaded)
    gc.freeze()  # a process that collects garbage would otherwise touch, and so copy, all that was imported
    _serve(socket.socket(fileno=int(sys.argv[1])))
