"""Ranks as processes that are forked in milliseconds, may die at any time, and report in lines of JSON."""

from __future__ import annotations

import gc
import json
import mmap
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from moe_rt.chaos import member


class Crew:
    """Ranks 0 to size - 1, each forked from this process, which must have imported torch but never used it.

    Every session is one life of a group: ranks meet anew, work, report, and leave. Those that died are replaced.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pids: dict[int, int] = {}
        self._tell: dict[int, int] = {}  # the write ends of the ranks' commands
        self._hear: dict[int, int] = {}
        self._sessions = 0
        self._directory = tempfile.TemporaryDirectory(prefix="moe_rt_chaos_")
        # When each rank last began something: what is left of a rank that was killed in it.
        self._clock = mmap.mmap(-1, 8 * size)
        self.began = memoryview(self._clock).cast("d")
        gc.freeze()  # a rank that collects garbage would otherwise touch, and so copy, all that was imported

    def session(self, ranks: Iterable[int], **orders: Any) -> list[int]:
        """Starts who is missing of `ranks` and gives them the same orders, see `member.serve`; returns their list."""
        self._sessions += 1
        store, ranks = f"{self._directory.name}/{self._sessions}", list(ranks)
        for new_rank, rank in enumerate(ranks):
            if rank not in self._pids:
                self._start(rank)
            line = json.dumps({"store": store, "rank": new_rank, "size": len(ranks), **orders})
            os.write(self._tell[rank], line.encode() + b"\n")
        return ranks

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

    def wake(self, rank: int) -> None:
        """Lets a stopped rank go on."""
        os.kill(self._pids[rank], signal.SIGCONT)

    def kill(self, rank: int) -> None:
        """Ends the rank, whatever it does, and forgets it."""
        pid = self._pids.pop(rank)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(self._tell.pop(rank))
        os.close(self._hear.pop(rank))

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in list(self._pids):
            self.kill(rank)
        self._directory.cleanup()

    def _start(self, rank: int) -> None:
        orders, tell = os.pipe()
        hear, reports = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for fd in (tell, hear, *self._tell.values(), *self._hear.values()):
                    os.close(fd)  # a pipe ends when its last holder does
                member.serve(orders, reports, self.began[rank : rank + 1])
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)  # the parent's frames and exit handlers, which end all ranks, are not ours to run
        os.close(orders)
        os.close(reports)
        self._pids[rank], self._tell[rank], self._hear[rank] = pid, tell, hear
