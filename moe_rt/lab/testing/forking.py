"""Forks processes in milliseconds: from this process, or from a server that has imported torch and never used it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any, Protocol

from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.endings import end_with, ended_within

Work = Callable[..., object]
# Includes what torch imports at the first gradient, comparison or optimiser step, which takes each rank seconds.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes"]
PRELOAD += ["torch._dynamo", "torch.testing", "moe_rt.nn.layer", "moe_rt.lab.testing.rounds"]


@dataclass(frozen=True)
class Forked:
    """A process by its id and by a descriptor, which means the same process for as long as it is open."""

    pid: int
    pidfd: int
    own: bool  # a child of this process, which must collect it

    def signal(self, number: int) -> None:
        """Send a signal; does nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """True if the process ends within `timeout_s`, collected or not."""
        return ended_within(self.pidfd, timeout_s)

    def kill(self) -> None:
        """End the process in any state, stopped or not, and forget it."""
        self.signal(signal.SIGKILL)
        if self.own:
            os.waitpid(self.pid, 0)
        else:
            self.has_ended(float(1 << 20))
        os.close(self.pidfd)


class Closes(Protocol):
    def close(self) -> object:
        """Close a descriptor."""
        ...


def fork(work: Work, arguments: Iterable[Any], end: Channel, others: Iterable[Closes]) -> Forked:
    """Fork this process. The new one closes `others`, which it would keep open, and runs work(end, *arguments)."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the new process would write it again
    starter, pid = os.getpid(), os.fork()
    if pid == 0:
        status = 1
        try:
            gc.freeze()  # or garbage collection would touch, and so copy, everything that the parent has imported
            end_with(starter)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # handlers are inherited from the parent
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored, as under nohup
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
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
            os._exit(status)  # the parent's frames and exit handlers must not run here
    return Forked(pid, os.pidfd_open(pid), own=True)


def fork_in_server(work: Work, arguments: Iterable[Any], end: Channel) -> Forked:
    """Run work(end, *arguments) in a process of Python's fork server: for callers that have threads or have used torch.

    It ends with this process. `work` is a function of a module. Multiprocessing pickles it and the arguments, so this
    is for programs that trust themselves: tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_enter, args=(os.getpid(), end, work, tuple(arguments)), daemon=True)
    process.start()
    pid = int(process.pid or 0)
    return Forked(pid, os.pidfd_open(pid), own=False)


def _enter(starter: int, end: Channel, work: Work, arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # see fork
    os.setsid()  # Ctrl-C reaches only the starter
    # The kernel ends this process with the server, and the server ends when all have closed this descriptor. The
    # starter does so at its end; multiprocessing gave it to this process too.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    end_with(starter)
    work(end, *arguments)
