"""Ranks as processes that are forked in milliseconds, may die at any time, and report in lines of JSON."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import TCPStore

from moe_rt.chaos import worker
from moe_rt.chaos.board import Board

ENDLESS = 2**62  # steps, until something else ends a session
_STORE = -1  # among ranks


class RankPool:
    """Ranks 0 to size - 1, each forked from this process, which must have imported torch but never used it.

    Every session is one life of a group: ranks meet anew, work, report, and leave. Those that died are replaced.
    """

    def __init__(self, size: int) -> None:
        self.size, self.board = size, Board(size)
        self._pids: dict[int, int] = {}
        self._tell: dict[int, int] = {}  # the write ends of the ranks' commands
        self._hear: dict[int, int] = {}
        self._sessions = 0
        gc.freeze()  # a rank that collects garbage would otherwise touch, and so copy, all that was imported
        self._start(_STORE, _serve_store)
        self._port = int(os.read(self._hear[_STORE], 16))

    def session(
        self, ranks: Sequence[int], steps: int, only: Mapping[int, dict[str, Any]] | None = None, **orders: Any
    ) -> None:
        """Starts who is missing of `ranks` and gives them the same orders, see `worker.serve`; `only` has a rank's own.

        `timeout_s` and `init_timeout_s` are `worker.PATIENCE_S` if they are not given.
        """
        self._sessions += 1
        self.board.steps[0] = steps
        common = {"timeout_s": worker.PATIENCE_S, "init_timeout_s": worker.PATIENCE_S, **orders}
        common |= {"port": self._port, "session": str(self._sessions), "size": len(ranks)}
        for new_rank, rank in enumerate(ranks):
            if rank not in self._pids:
                self._start(rank, partial(worker.serve, self.board, rank))
            self.board.began[rank], self.board.step[rank] = 0.0, -1
            line = json.dumps({**common, "rank": new_rank, **(only or {}).get(rank, {})})
            os.write(self._tell[rank], line.encode() + b"\n")

    def report(self, rank: int, timeout_s: float) -> dict[str, Any]:
        """What the rank says at the end of its session, or {"raised": "killed"} or {"raised": "hung"}."""
        deadline, text = time.monotonic() + timeout_s, b""
        while not text.endswith(b"\n"):
            if not select.select([self._hear[rank]], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill(rank)
                return {"raised": "hung"}
            part = os.read(self._hear[rank], 65536)
            if not part:
                self.kill(rank)
                return {"raised": "killed"}
            text += part
        return dict(json.loads(text))

    def reports(self, ranks: Sequence[int], timeout_s: float) -> dict[int, dict[str, Any]]:
        """`report` of each, in that order."""
        return {rank: self.report(rank, timeout_s) for rank in ranks}

    def await_steps(self, ranks: Sequence[int], steps: int) -> None:
        """Returns when each of the ranks has begun so many steps, or one has ended its session."""
        reports = [self._hear[rank] for rank in ranks]
        while any(self.board.step[rank] < steps for rank in ranks) and not select.select(reports, [], [], 0.001)[0]:
            pass

    def await_stop(self, rank: int) -> None:
        """Returns when the rank is stopped, or has ended its session."""
        stopped = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self._pids[rank], stopped) is None:
            if select.select([self._hear[rank]], [], [], 0.001)[0]:
                return

    def send(self, rank: int, number: int) -> None:
        """Sends the rank a signal."""
        os.kill(self._pids[rank], number)

    def kill(self, rank: int) -> None:
        """Ends the rank, whatever it does, and forgets it."""
        pid = self._pids.pop(rank)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(self._tell.pop(rank))
        os.close(self._hear.pop(rank))

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in list(self._pids):
            self.kill(rank)

    def _start(self, rank: int, work: Callable[[int, int], object]) -> None:
        """Forks a process that reads from one pipe and writes into another."""
        orders, tell = os.pipe()
        hear, reports = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for fd in (tell, hear, *self._tell.values(), *self._hear.values()):
                    os.close(fd)  # a pipe ends when its last holder does
                work(orders, reports)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)  # the parent's frames and exit handlers, which end all ranks, are not ours to run
        os.close(orders)
        os.close(reports)
        self._pids[rank], self._tell[rank], self._hear[rank] = pid, tell, hear


def _serve_store(orders: int, reports: int) -> None:
    """Where ranks meet, as under torchrun: a process that outlives every rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(reports, str(store.port).encode())
    os.read(orders, 1)  # nothing comes, but the end does
