"""Rank functions for tests of scarce memory and other users; each returns what its rank saw."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

from faults.cases_faults import good_round, open_buffer
from support.routing import make_spec

NOBODY = 65534
LARGE = {"num_max_tokens_per_rank": 2**12, "hidden": 2**12}  # segments of about 1 GiB


def open_within_limit(group: Any, limit: str, num_bytes: int) -> str:
    """Limit only rank 1; afterwards, without the limit, the same group makes a small buffer."""
    which = getattr(resource, limit)
    soft, hard = resource.getrlimit(which)
    if group.rank() == 1:
        resource.setrlimit(which, (num_bytes, hard))
    try:
        open_buffer(group, make_spec(group.size(), **LARGE)).close()
        text = "no error"
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(which, (soft, hard))
    with open_buffer(group) as buffer:
        good_round(buffer)
    return text


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def open_as_another_user(group: Any) -> str:
    """Rank 1 permanently drops its privileges before it makes a buffer with rank 0."""
    if group.rank() == 1:
        _become_nobody()
    return _open(group)


def _open(group: Any) -> str:
    try:
        open_buffer(group).close()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def open_while_not_dumpable(group: Any) -> str:
    """Ranks of one unprivileged user, of which the last is not dumpable, and then dumpable again."""
    pr_set_dumpable, prctl = 4, ctypes.CDLL(None).prctl
    if os.geteuid() == 0:
        _become_nobody()
    prctl(pr_set_dumpable, int(group.rank() == 0))  # a process that dropped privileges is not dumpable either
    text = _open(group)
    prctl(pr_set_dumpable, 1)
    with open_buffer(group) as buffer:
        good_round(buffer)
    return text
