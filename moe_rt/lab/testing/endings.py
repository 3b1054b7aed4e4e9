"""Ends every started process: at SIGTERM, SIGHUP or Ctrl-C, or when the starter itself is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

from moe_rt.group.processes import watch

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Context in which SIGTERM, SIGHUP and SIGINT raise SystemExit or KeyboardInterrupt, so that every `finally` runs.

    SIGTERM, which `timeout` sends, and SIGHUP, sent when a terminal closes, would end Python immediately. While `held`,
    they raise only afterwards: a process that is being started could not be ended yet. In threads other than the main
    one, which get no signals, this does nothing. An ignored signal stays ignored, such as SIGINT in a background job of
    a shell and SIGHUP under nohup.
    """

    def __init__(self) -> None:
        self._held, self._arrived = 0, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._arrive)
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay exceptions because of signals to the end of this context."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._arrived and not self._held:
            self._raise(self._arrived)

    def _arrive(self, number: int, frame: object) -> None:
        self._arrived = number
        if not self._held:
            self._raise(number)

    def _raise(self, number: int) -> None:
        self._arrived = 0
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def ended_within(pidfd: int, seconds: float | None = None) -> bool:
    """Wait for the end of a process, without a limit if `seconds` is None. It need not have been collected."""
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1e3 * seconds))


def end_with(starter: int) -> None:
    """Make this process end when `starter` ends: the process that started it, or one further up.

    The kernel kills it, stopped or not, when the thread that forked it ends. That may have happened before this call.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if watch(starter).has_ended():
        os.kill(os.getpid(), signal.SIGKILL)
