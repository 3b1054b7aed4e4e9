"""Runs a case on every rank of a group, for ranks that are threads and ranks that are processes.

A case is a module-level function `case(group, *args)`; its result or exception is returned per rank. Process ranks stay
alive between cases, since joining a group takes longer than most cases.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.halves import halve_all_engines

from moe_rt.group import thread_ranks
from moe_rt.group.groups import rendezvous_of
from moe_rt.lab.testing import process_ranks
from moe_rt.lab.testing.channel import Channel

CASE_TIMEOUT_S = 2400.0  # for hangs only: on a busy machine a cold compiler takes more than ten minutes
END_S = 100.0
TELL_STACKS = signal.SIGUSR1
halve_all_engines()


def named_case(group: Any, module: str, name: str, *args: Any) -> Any:
    """Run a case of a module that the caller would take long to import."""
    return getattr(importlib.import_module(module), name)(group, *args)


def meet(group: Any) -> None:
    """Return when every rank is here: a later failure of a rank cannot affect any earlier op."""
    rendezvous_of(group).all_gather("", CASE_TIMEOUT_S)


class Ranks:
    """`run` raises the first rank's error; `outcomes` returns each rank's value or exception."""

    heap: str
    size: int

    def outcomes(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        raise TypeError("use ThreadRanks or ProcessRanks")

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        outcomes = self.outcomes(case, *args)
        errors = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
        for rank, error in errors.items():  # the one that is raised may be a consequence of another
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        for error in errors.values():
            raise error
        return outcomes


class ThreadRanks(Ranks):
    """Ranks on the CPU, or virtual ranks of one GPU or of its stand-in."""

    def __init__(self, size: int, device: Any = "cpu", nodes: Sequence[int] | None = None) -> None:
        self.size, self.heap = size, "threads" if device == "cpu" else "loopback"
        self._ranks = thread_ranks.ThreadRanks(size, device, nodes=nodes)

    def outcomes(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        return self._ranks.outcomes(case, *args, seconds=CASE_TIMEOUT_S)


class ProcessRanks(Ranks):
    """Ranks that are processes. Cases, arguments and outcomes are pickled, as both ends are tests."""

    heap = "shm"

    def __init__(self, size: int) -> None:
        self.size = size
        # Use a port instead of a file: a rank may have dropped its rights to a directory.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._ranks = process_ranks.ProcessRanks(in_server=True)
        self._hang = False
        self._lives = 0
        self._start()

    def _start(self) -> None:
        for rank in range(self.size):
            self._ranks.start(rank, _serve, rank, self.size, self._store.port, str(self._lives))
        self.pids = [self._ranks.pid(rank) for rank in range(self.size)]
        self._lives += 1

    def outcomes(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        if self._hang:  # a late reply of these ranks would be taken for an answer to this case
            self._hang = False
            self._ranks.close()
            self._start()
        message = pickle.dumps((case, args))
        for rank in range(self.size):
            self._ranks.send(rank, message)
        deadline = time.monotonic() + CASE_TIMEOUT_S  # shared: the last rank to hang must not hide why the first failed
        return [self._outcome(rank, deadline) for rank in range(self.size)]

    def _outcome(self, rank: int, deadline: float) -> Any:
        try:
            return pickle.loads(self._ranks.receive(rank, max(0.0, deadline - time.monotonic())))
        except TimeoutError:
            self._ranks.send_signal(rank, TELL_STACKS)
            self._hang = True
            return TimeoutError(f"rank {rank} did not finish; where its threads are stands on stderr")
        except EOFError:
            return ChildProcessError(f"rank {rank} died")

    def kill(self, rank: int) -> None:
        """Kill a rank; return when its process has exited."""
        self._ranks.send_signal(rank, signal.SIGKILL)
        assert self._ranks.await_end(rank, END_S)

    def close(self) -> None:
        """Let each rank leave its group, and kill ranks that do not exit."""
        for rank in range(self.size):
            self._ranks.hang_up(rank)
        for rank in range(self.size):
            self._ranks.await_end(rank, END_S)
        self._ranks.close()
        del self._store


def _serve(channel: Channel, rank: int, size: int, port: int, life: str, host: str = "localhost") -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    faulthandler.register(TELL_STACKS, all_threads=True)
    store = dist.PrefixStore(life, dist.TCPStore(host, port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    message = _next(channel)
    while message:
        channel.send(pickle.dumps(_outcome(*pickle.loads(message))))
        message = _next(channel)
    if dist.is_initialized():  # a case may have left the group
        dist.destroy_process_group()


def _next(channel: Channel) -> bytes:
    """Return b"" at the end."""
    try:
        return channel.receive()
    except EOFError:
        return b""


def _outcome(case: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return case(dist.group.WORLD, *args)
    except Exception as error:
        error.__notes__ = [traceback.format_exc()]  # add_note does not exist in Python 3.10
        return error
