"""Messages of bytes between a process and its parent."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time

_LENGTH = struct.Struct("<Q")
_MOST_AT_ONCE = 1 << 20


class Channel:
    """One end of a connection, which ends when no process has the other end open."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    @classmethod
    def of(cls, descriptor: int) -> Channel:
        """Make an end from a descriptor, and take ownership of it."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Send a message. Raises BrokenPipeError if the other end is closed."""
        self._end.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Return the next message.

        Raises:
            TimeoutError: it is not complete in time.
            EOFError: the other end was closed before it was complete.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        return self._exactly(length, deadline)

    def has_news(self, timeout_s: float = 0.0) -> bool:
        """True if a message, or the end, can be received within `timeout_s`."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))

    def close(self) -> None:
        self._end.close()

    def hang_up(self) -> None:
        """End the channel, even if other processes have copies of this end."""
        with contextlib.suppress(OSError):  # the other end is already closed
            self._end.shutdown(socket.SHUT_RDWR)
        self.close()

    def _exactly(self, count: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            if deadline is not None and not self.has_news(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"got {len(data)} of {count} bytes of a message in time")
            try:
                part = self._end.recv(min(count - len(data), _MOST_AT_ONCE))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError
            data += part
        return bytes(data)
