"""Why a rank leaves its group, in one line that it writes into its own segment for its peers to read.

Peers believe nothing of it: the bytes may be anything, and are shown as text on one line.
"""

from __future__ import annotations

from contextlib import suppress

from moe_rt import _engine
from moe_rt.errors import MoeRtError


def last_words(error: BaseException) -> bytes:
    """The class of an exception and the first line of what it says, in UTF-8, cut to what a segment has room for."""
    said = ""
    with suppress(Exception):  # a __str__ that raises must not hide the error that it belongs to
        said = str(error.args[0] if isinstance(error, MoeRtError) else error)
    first_line = next(iter(said.strip().splitlines()), "")
    name = type(error).__name__
    return cut(f"{name}: {first_line}" if first_line else name)


def cut(text: str) -> bytes:
    """UTF-8 of the text, as much of it as there is room for, and no half characters."""
    return text.encode(errors="replace")[: _engine.MOST_LAST_WORDS].decode(errors="ignore").encode()


def readable(words: bytes) -> str:
    """A peer's last words on one line; what would not print, or would move the cursor, is a blank."""
    return "".join(c if c.isprintable() else " " for c in words.decode(errors="replace")).strip()
