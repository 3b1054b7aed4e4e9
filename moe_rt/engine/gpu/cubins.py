"""Compiled kernels on disk, private to this user: a directory that others can write to is not trusted.

Code read from here runs on the GPU, so an entry counts only if its digest is right and it is a regular file of this
user. Ranks that start together compile each program once: one takes the program's lock while the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import stat
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 1
LOCK_SECONDS = 120.0
_POLL_SECONDS = 0.02
_NOT_KEPT = "compiled kernels are not kept"


def cache_directory() -> Path:
    """Return $MOE_RT_CACHE, else moe_rt in $XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("MOE_RT_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared, "moe_rt")
    return Path.home() / ".cache" / "moe_rt"


def temporary_directory() -> Path:
    """Return this user's directory among temporary files, which outlives no container, and often no restart."""
    return Path(tempfile.gettempdir(), f"moe_rt-{os.geteuid()}")


@contextlib.contextmanager
def open_cache() -> Iterator[CubinCache | None]:
    """Open the cache; None if no directory can be used. A warning says why, once.

    If the directory cannot be written, as in a container with a read-only home, processes share another one among the
    temporary files, and still find entries of the first. If MOE_RT_CACHE is set, no other directory is used.
    """
    cache, problem = None, ""
    for directory in (cache_directory, *([] if os.environ.get("MOE_RT_CACHE") else [temporary_directory])):
        try:
            cache = CubinCache(directory(), beneath=cache)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
            problem = problem or str(error)
            continue
        if cache.is_writable():
            break
        problem = problem or f"{directory()} cannot be written"
    if cache is None:
        _warn(f"{_NOT_KEPT}: {problem}; set MOE_RT_CACHE to a directory of your own that can be written")
    elif problem:
        where = f"kept in {temporary_directory()} only" if cache.is_writable() else "not kept"
        _warn(f"compiled kernels are {where}: {problem}; set MOE_RT_CACHE to a directory that lasts")
    try:
        yield cache
    finally:
        if cache is not None:
            cache.close()


class CubinCache:
    """Entries of one directory. Access is through its descriptor, so the directory cannot be swapped after the check.

    Args:
        beneath: another cache, searched for entries that this one lacks; it is closed with this one.

    Raises:
        OSError: the directory cannot be made, or is a link, another user's or writable by others.
    """

    def __init__(self, directory: Path, beneath: CubinCache | None = None) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
        if not _is_private(os.fstat(self._fd)):
            os.close(self._fd)
            raise PermissionError(f"{directory} belongs to another user or can be written by others")
        self._beneath = beneath

    def close(self) -> None:
        os.close(self._fd)
        if self._beneath is not None:
            self._beneath.close()

    def is_writable(self) -> bool:
        return os.access(f"/proc/self/fd/{self._fd}", os.W_OK | os.X_OK)

    def load(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """Return the facts and the payload saved under a key; None if the entry is absent or invalid."""
        found = self._load(key)
        return found if found is not None or self._beneath is None else self._beneath.load(key)

    def _load(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            # O_NONBLOCK: opening a fifo must not block.
            fd = self._open(_entry(key), os.O_RDONLY | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode) or not _is_private(found):
                    return None
                line, _, payload = file.read().partition(b"\n")
            header = json.loads(line)
            facts = header["facts"]
            if (header["format"], header["key"]) == (FORMAT, key) and header["sha256"] == _digest(facts, payload):
                return facts, payload
        return None

    def save(self, key: str, facts: dict[str, Any], payload: bytes) -> None:
        """Save an entry in one atomic step. If that fails, warn and leave nothing on disk."""
        header = {"format": FORMAT, "key": key, "sha256": _digest(facts, payload), "facts": facts}
        temporary = f".{uuid.uuid4().hex}"
        try:
            with open(self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(json.dumps(header).encode() + b"\n" + payload)
            os.rename(temporary, _entry(key), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            _warn(f"{_NOT_KEPT}: {error}")
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)

    @contextlib.contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[None]:
        """Take the lock of a key, or continue without it after `seconds`: the lock saves work, it protects nothing."""
        name = f"{key}.lock"
        try:
            fd = self._open(name, os.O_RDWR | os.O_CREAT)
        except OSError:
            yield
            return
        held = False
        try:
            deadline = time.monotonic() + seconds
            while not (held := _try_lock(fd)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            # A process that opens the name anew first checks for the entry, and finds it unless this attempt failed.
            if held:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)
            os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)


def _entry(key: str) -> str:
    return f"{key}.cubin"


def _digest(facts: dict[str, Any], payload: bytes) -> str:
    """Digest of facts and payload: both decide about launches."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + b"\n" + payload).hexdigest()


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)
