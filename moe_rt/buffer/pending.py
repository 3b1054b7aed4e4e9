"""An op that has begun: its rows are on their way, and its result is not received yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """Result of `Buffer.dispatch` or `Buffer.combine` with wait=False.

    The op's inputs must not change before `wait`. At most `depth` ops of a buffer are under way; one more is refused.
    """

    __slots__ = ("_arguments", "_finish", "_result")

    def __init__(self, finish: Callable[..., Any], arguments: tuple[Any, ...], result: Callable[..., T]) -> None:
        self._finish, self._arguments, self._result = finish, arguments, result

    def wait(self) -> T:
        """Wait for every rank to begin the op, receive, and return what the op returns with wait=True.

        May be called on another thread than the op. On a GPU the host does not wait: the current stream does.

        Raises:
            InvalidInput: this op was waited for already, or another call has ended it, and `depth` others have begun
                since; only on this rank.
            MoeRtError: see the op.
        """
        return self._result(self._finish(*self._arguments))
