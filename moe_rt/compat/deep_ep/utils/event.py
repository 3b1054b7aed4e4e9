"""DeepEP's events. An op on CPU ranks is complete when it returns, so its event has nothing left to wait for."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from moe_rt.errors import InvalidInput


class EventHandle:
    """A point in the work of the current stream; on CPU ranks it has always passed.

    Args:
        device: device of the stream; None: the current GPU if this process uses one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        on_gpu = torch.cuda.is_initialized() if device is None else device.type == "cuda"
        self._event: Any = torch.cuda.current_stream(device).record_event() if on_gpu else None

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, or None, to wait for by a call or at the end of a `with` block."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self._release = False
        self.hook_after_wait: Callable[[], None] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Wait for the event. Raises InvalidInput if the op was called without async_finish=True and has none."""
        if self.event is None:
            raise InvalidInput(
                "current_stream_wait: got an op without an event, expected async_finish=True in its call"
            )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Call a function once after the next wait."""
        if self.hook_after_wait is not None:
            raise InvalidInput("register_hook_after_wait: got a second hook, expected one")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release_handle=release)


def event_of(wanted: bool, result: Any) -> EventOverlap:
    """Return the event of an op that gave this result, a tensor or a tuple of them; without an event if unwanted."""
    if not wanted:
        return EventOverlap()
    return EventOverlap(EventHandle((result[0] if isinstance(result, tuple) else result).device))
