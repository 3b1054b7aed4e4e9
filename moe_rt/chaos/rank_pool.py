"""The ranks of trials: every session is one life of a group of them, in which each works and then reports."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import TCPStore

from moe_rt.chaos import worker
from moe_rt.chaos.board import Board
from moe_rt.heap.processes import state_letter
from moe_rt.testing.channel import Channel
from moe_rt.testing.process_ranks import ProcessRanks

ENDLESS = 2**62  # steps, until something else ends a session
STORE = -1  # among ranks
MORE_STEPS = 20  # of a session that comes to its end


class RankPool(ProcessRanks):
    """Ranks 0 to size - 1, each forked from this process, which must have imported torch but never used it.

    In every session ranks meet anew, work, report, and leave. Those that died are replaced. `host` is where they meet.
    """

    far = False  # whether some are on other hosts

    def __init__(self, size: int, host: str = "localhost") -> None:
        super().__init__()
        self.size, self.board = size, Board(size)
        self._sessions, self._host = 0, host
        self.start(STORE, _serve_store, host)
        self._port = int(self.hear(STORE))

    def session(
        self, ranks: Sequence[int], steps: int, only: Mapping[int, dict[str, Any]] | None = None, **orders: Any
    ) -> None:
        """Starts who is missing of `ranks` and gives them the same orders, see `worker.serve`; `only` has a rank's own.

        `timeout_s` and `init_timeout_s` are `worker.PATIENCE_S` if they are not given.
        """
        self._sessions += 1
        common = {"timeout_s": worker.PATIENCE_S, "init_timeout_s": worker.PATIENCE_S, **orders}
        common |= {"host": self._host, "port": self._port, "session": str(self._sessions), "size": len(ranks)}
        for new_rank, rank in enumerate(ranks):
            if rank not in self:
                self.start(rank, worker.serve, self.board, rank, self.far)
            self.board.began[rank], self.board.step[rank], self.board.steps[rank] = 0.0, -1, steps
            self.tell(rank, json.dumps({**common, "rank": new_rank, **(only or {}).get(rank, {})}).encode())

    def report(self, rank: int, timeout_s: float) -> dict[str, Any]:
        """What the rank says at the end of its session, or {"raised": "killed"} or {"raised": "hung"}."""
        try:
            return dict(json.loads(self.hear(rank, timeout_s)))
        except (EOFError, TimeoutError) as error:
            self.kill(rank)
            return {"raised": "killed" if isinstance(error, EOFError) else "hung"}

    def reports(self, ranks: Sequence[int], timeout_s: float) -> dict[int, dict[str, Any]]:
        """`report` of each, in that order."""
        return {rank: self.report(rank, timeout_s) for rank in ranks}

    def await_steps(self, ranks: Sequence[int], steps: int) -> None:
        """Returns when each of the ranks has begun so many steps, or one has ended its session."""
        while any(self.board.step[rank] < steps for rank in ranks) and not self.has_news(ranks, 0.001):
            pass

    def await_stop(self, rank: int) -> None:
        """Returns when the rank is stopped, or has ended its session."""
        while not self.stopped(rank) and not self.has_news([rank], 0.001):
            pass

    def stopped(self, rank: int) -> bool:
        """Whether a signal has stopped the rank."""
        return state_letter(self.pid(rank)) == "T"

    def finish(self, ranks: Sequence[int]) -> int:
        """Lets an endless session end soon, and returns the number of its steps."""
        for rank in ranks:
            self.send_signal(rank, signal.SIGSTOP)
        for rank in ranks:
            self.await_stop(rank)
        last = self.set_end(ranks)
        for rank in ranks:
            self.send_signal(rank, signal.SIGCONT)
        return last

    def set_end(self, ranks: Sequence[int]) -> int:
        """Of an endless session whose ranks are stopped: how many steps it has from now on."""
        last = max(self.board.step) + MORE_STEPS
        for rank in ranks:
            self.board.steps[rank] = last
        return last

    def kept(self) -> dict[str, int]:
        """What the ranks have left besides what each of them says."""
        return {}


def _serve_store(channel: Channel, host: str) -> None:
    """Where ranks meet, as under torchrun: a process that outlives every rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    channel.send(str(store.port).encode())
    with suppress(EOFError):
        while not channel.receive():
            channel.send(str(store.num_keys()).encode())
