"""Ranks that are processes: started in milliseconds, reused, and allowed to die at any time."""

from __future__ import annotations

import select
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeVar

from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.endings import Signals
from moe_rt.lab.testing.forking import Forked, Work, fork, fork_in_server

Pool = TypeVar("Pool", bound="ProcessRanks")


class ProcessRanks:
    """Ranks that run work(channel, *arguments) and exchange messages of bytes with this process over the channel.

    Leaving the pool ends all ranks. SIGTERM and Ctrl-C leave it, and the death of this process also ends the ranks.

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
        """True if the rank was started and not killed since; it may have died."""
        return rank in self._processes

    def start(self, rank: int, work: Work, *arguments: Any) -> None:
        """Start a rank that is not running."""
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

    def send(self, rank: int, message: bytes) -> None:
        """Send a message. A dead rank does not receive it; `receive` then raises."""
        try:
            self._channels[rank].send(message)
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self, rank: int, timeout_s: float | None = None) -> bytes:
        """Return the rank's next message.

        Raises:
            EOFError: the rank has ended.
            TimeoutError: no message arrived in time.
        """
        return self._channels[rank].receive(timeout_s)

    def has_news(self, ranks: Iterable[int], timeout_s: float = 0.0) -> bool:
        """True if any of the ranks sends a message or ends within `timeout_s`."""
        poll = select.poll()  # select() takes no descriptor above 1023
        for rank in ranks:
            poll.register(self._channels[rank].fileno(), select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))

    def send_signal(self, rank: int, number: int) -> None:
        self._processes[rank].signal(number)

    def hang_up(self, rank: int) -> None:
        """End the rank's channel; the rank may run until it is killed."""
        self._channels[rank].hang_up()

    def await_end(self, rank: int, timeout_s: float) -> bool:
        """Wait until nothing of the rank runs or holds memory, at most `timeout_s`; True if it has ended."""
        return self._processes[rank].has_ended(timeout_s)

    def kill(self, rank: int) -> None:
        """End the rank in any state, and forget it."""
        self._processes.pop(rank).kill()
        self._channels.pop(rank).close()

    def close(self) -> None:
        """End all ranks."""
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
