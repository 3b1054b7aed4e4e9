"""Ranks that are processes: started in milliseconds, used again and again, and any of them may die at any time."""

from __future__ import annotations

import select
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeVar

from moe_rt.testing.channel import Channel
from moe_rt.testing.endings import Signals
from moe_rt.testing.forking import Forked, Work, fork, fork_in_server

Pool = TypeVar("Pool", bound="ProcessRanks")


class ProcessRanks:
    """Each rank runs work(channel, *arguments) of its own and is spoken to in messages of bytes over the channel.

    Leaving the pool ends all of them, SIGTERM and Ctrl-C lead there, and the death of this process ends them, too.

    Args:
        in_server: Python's fork server forks the ranks, see `forking.fork_in_server`; otherwise this process does,
            which must have imported torch but never used it.
    """

    def __init__(self, in_server: bool = False) -> None:
        self._in_server = in_server
        self._processes: dict[int, Forked] = {}
        self._channels: dict[int, Channel] = {}
        self._signals = Signals()

    def __contains__(self, rank: int) -> bool:
        """Whether the rank was started and not killed since; it may have died."""
        return rank in self._processes

    def start(self, rank: int, work: Work, *arguments: Any) -> None:
        """Starts a rank that there is not."""
        with self._signals.held():
            ours, theirs = Channel.pair()
            if self._in_server:
                self._processes[rank] = fork_in_server(work, arguments, theirs)
            else:
                self._processes[rank] = fork(work, arguments, theirs, [ours, *self._channels.values()])
            self._channels[rank] = ours
            theirs.close()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def tell(self, rank: int, message: bytes) -> None:
        """A rank that has died hears nothing; that shows in `hear`."""
        try:
            self._channels[rank].send(message)
        except (BrokenPipeError, ConnectionResetError):
            return

    def hear(self, rank: int, timeout_s: float | None = None) -> bytes:
        """The rank's next message.

        Raises:
            EOFError: the rank has ended.
            TimeoutError: it said nothing in time.
        """
        return self._channels[rank].receive(timeout_s)

    def has_news(self, ranks: Iterable[int], timeout_s: float = 0.0) -> bool:
        """Whether any of the ranks has said something or ended; waits for it so long."""
        poll = select.poll()  # select() takes no descriptor above 1023
        for rank in ranks:
            poll.register(self._channels[rank].fileno(), select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))

    def send_signal(self, rank: int, number: int) -> None:
        self._processes[rank].signal(number)

    def hang_up(self, rank: int) -> None:
        """The rank's channel comes to its end; what it does then is its own affair, until it is killed."""
        self._channels[rank].hang_up()

    def await_end(self, rank: int, timeout_s: float) -> bool:
        """Returns when nothing of the rank runs or holds memory any more, or so much later; whether it has ended."""
        return self._processes[rank].has_ended(timeout_s)

    def kill(self, rank: int) -> None:
        """Ends the rank, whatever it does, and forgets it."""
        self._processes.pop(rank).kill()
        self._channels.pop(rank).close()

    def close(self) -> None:
        """Ends all ranks."""
        for rank in list(self._processes):
            self.kill(rank)

    def __enter__(self: Pool) -> Pool:
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._signals.held():
            self.close()
        self._signals.__exit__()
