"""Ranks of trials. In every session they form a group, work and report."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from moe_rt.group.board import read
from moe_rt.group.meeting import OVER
from moe_rt.group.processes import state_letter
from moe_rt.lab.chaos import worker
from moe_rt.lab.chaos.worker import Board
from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.process_ranks import ProcessRanks

ENDLESS = 2**62  # steps of a session that is ended from outside
STORE = -1  # place of the store's process
MORE_STEPS = 20  # steps left when an endless session is given an end


class RankPool(ProcessRanks):
    """Ranks 0 to size - 1, each forked from this process, which must have imported torch but never used it.

    In every session ranks rendezvous anew on `host`, work, report, and leave. Dead ranks are replaced.
    """

    remote = False  # True if some ranks are on other hosts

    def __init__(self, size: int, host: str = "localhost") -> None:
        super().__init__()
        self.size, self.board = size, Board(size)
        self._sessions, self._host = 0, host
        self.start(STORE, _serve_store, host)
        self._port = int(self.receive(STORE))

    def session(
        self, ranks: Sequence[int], steps: int, only: Mapping[int, dict[str, Any]] | None = None, **orders: Any
    ) -> None:
        """Start the missing ones of `ranks` and send all the same orders, see `worker.serve`; `only` has orders for
        single ranks.

        `timeout_s` and `init_timeout_s` are `worker.PATIENCE_S` if they are not given.
        """
        self._sessions += 1
        common = {"timeout_s": worker.PATIENCE_S, "init_timeout_s": worker.PATIENCE_S, **orders}
        common |= {"host": self._host, "port": self._port, "session": str(self._sessions), "size": len(ranks)}
        for new_rank, rank in enumerate(ranks):
            if rank not in self:
                self.start(rank, worker.serve, self.board, rank, self.remote)
            self.board.began[rank], self.board.step[rank], self.board.steps[rank] = 0.0, -1, steps
            self.send(rank, json.dumps({**common, "rank": new_rank, **(only or {}).get(rank, {})}).encode())

    def report(self, rank: int, timeout_s: float) -> dict[str, Any]:
        """Return the rank's report at the end of its session, or {"raised": "killed"} or {"raised": "hung"}."""
        try:
            return dict(json.loads(self.receive(rank, timeout_s)))
        except (EOFError, TimeoutError) as error:
            self.kill(rank)
            return {"raised": "killed" if isinstance(error, EOFError) else "hung"}

    def reports(self, ranks: Sequence[int], timeout_s: float) -> dict[int, dict[str, Any]]:
        """Return the report of each rank, in that order."""
        return {rank: self.report(rank, timeout_s) for rank in ranks}

    def await_steps(self, ranks: Sequence[int], steps: int) -> None:
        """Wait until each of the ranks has begun `steps` steps, or one has ended its session."""
        while any(self.board.step[rank] < steps for rank in ranks) and not self.has_news(ranks, 0.001):
            pass

    def await_stop(self, rank: int) -> None:
        """Wait until the rank is stopped, or has ended its session."""
        while not self.stopped(rank) and not self.has_news([rank], 0.001):
            pass

    def stopped(self, rank: int) -> bool:
        """True if a signal has stopped the rank."""
        return state_letter(self.pid(rank)) == "T"

    def finish(self, ranks: Sequence[int]) -> int:
        """Let an endless session end soon, and return its number of steps."""
        for rank in ranks:
            self.send_signal(rank, signal.SIGSTOP)
        for rank in ranks:
            self.await_stop(rank)
        last = self.set_end(ranks)
        for rank in ranks:
            self.send_signal(rank, signal.SIGCONT)
        return last

    def set_end(self, ranks: Sequence[int]) -> int:
        """Set the number of steps of an endless session whose ranks are stopped, and return it."""
        last = max(self.board.step) + MORE_STEPS
        for rank in ranks:
            self.board.steps[rank] = last
        return last

    def keys_left(self) -> int:
        """Return the number of keys in the store that sessions should have deleted; see `keys_left`."""
        self.send(STORE, b"")
        return int(self.receive(STORE))

    def kept(self) -> dict[str, int]:
        """Count resources that the ranks have leaked, beyond those in their reports."""
        return {}


def _serve_store(channel: Channel, host: str) -> None:
    """Serve the store for the rendezvous, as under torchrun: in a process that outlives every rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = TCPStore(host, 0, is_master=True)
    channel.send(str(store.port).encode())
    with suppress(EOFError):
        while not channel.receive():
            channel.send(str(keys_left(store)).encode())


def keys_left(store: Store) -> int:
    """Return the number of moe_rt's keys in the store without places, counts, and words of meetings not held."""
    keys = [key for key in store.list_keys() if "moe_rt/" in key and key.split("/")[-2] not in ("meetings", "places")]
    return sum(read(store, key) not in (None, OVER) for key in keys)
