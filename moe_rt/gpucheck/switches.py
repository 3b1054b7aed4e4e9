"""Switches in the environment, for buffers that are made while they are set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from moe_rt.native.ring import RING_VARIABLE


@contextmanager
def rings(*, on: bool) -> Iterator[None]:
    """Whether rows may go through shared memory; where the environment has said so, that stays."""
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
