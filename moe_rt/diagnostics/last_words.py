"""Last words: why a rank leaves its group, in one line that it writes into its own segment for its peers.

Peers trust none of it: the bytes may be anything, and are shown as text on one line.
"""

from __future__ import annotations

from contextlib import suppress

from moe_rt import _engine
from moe_rt.errors import MoeRtError


def last_words(error: BaseException) -> bytes:
    """Return an exception's class and the first line of its message, in UTF-8, cut to the space in a segment."""
    said = ""
    with suppress(Exception):  # a __str__ that raises must not hide the error that it belongs to
        said = str(error.args[0] if isinstance(error, MoeRtError) else error)
    first_line = next(iter(said.strip().splitlines()), "")
    name = type(error).__name__
    return cut(f"{name}: {first_line}" if first_line else name)


def cut(text: str) -> bytes:
    """Encode the text in UTF-8, cut between characters to the space in a segment."""
    return text.encode(errors="replace")[: _engine.MOST_LAST_WORDS].decode(errors="ignore").encode()


def readable(words: bytes) -> str:
    """Return a peer's last words on one line, with blanks for characters that do not print or move the cursor."""
    return "".join(c if c.isprintable() else " " for c in words.decode(errors="replace")).strip()
