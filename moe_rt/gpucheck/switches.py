"""Environment switches for buffers that are created while they are set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from moe_rt.native.ring import RING_VARIABLE


@contextmanager
def rings(*, on: bool) -> Iterator[None]:
    """Keep rows out of shared memory if not `on`. If `on`, the environment's own setting applies."""
    before = os.environ.get(RING_VARIABLE)
    if not on:
        os.environ[RING_VARIABLE] = "0"
    try:
        yield
    finally:
        if not on and before is None:
            del os.environ[RING_VARIABLE]
        elif before is not None:
            os.environ[RING_VARIABLE] = before
