"""Runs a function on every rank of a group, for ranks that are threads and ranks that are processes.

A case is a module-level function `case(group, *args)`; what it returns or raises comes back per rank. Process ranks are
kept alive between cases, since starting one costs seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from moe_rt import ThreadGroup

CASE_TIMEOUT_S = 120.0


class Ranks:
    """`run` raises the first rank's error; `outcomes` returns each rank's value or exception."""

    heap: str
    size: int

    def outcomes(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        raise TypeError("use ThreadRanks or ProcessRanks")

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        outcomes = self.outcomes(case, *args)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes


class ThreadRanks(Ranks):
    """On the CPU, or as virtual ranks of one GPU or what stands in for it."""

    def __init__(self, size: int, device: Any = "cpu") -> None:
        self.size, self.device = size, device
        self.heap = "threads" if device == "cpu" else "loopback"

    def outcomes(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        results: list[Any] = [TimeoutError("rank did not finish")] * self.size
        groups = ThreadGroup.make(self.size, self.device)

        def work(rank: int) -> None:
            try:
                results[rank] = case(groups[rank], *args)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(CASE_TIMEOUT_S)
        return results


class ProcessRanks(Ranks):
    heap = "shm"

    def __init__(self, size: int) -> None:
        self.size = size
        # A port, not a file: a rank may have given up the rights to a directory.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "moe_rt"])
        self.processes, self._pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def outcomes(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((case, args))
        return [self._receive(rank) for rank in range(self.size)]

    def _receive(self, rank: int) -> Any:
        if not self._pipes[rank].poll(CASE_TIMEOUT_S):
            return TimeoutError(f"rank {rank} did not finish")
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return ChildProcessError(f"rank {rank} died")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()
        del self._store


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=size)
    while pipe.poll(None):
        try:
            case, args = pipe.recv()
        except EOFError:
            break
        try:
            result = case(dist.group.WORLD, *args)
        except Exception as error:
            error.__notes__ = [traceback.format_exc()]  # add_note, which Python 3.10 lacks
            result = error
        pipe.send(result)
    if dist.is_initialized():  # a case may have left the group
        dist.destroy_process_group()
