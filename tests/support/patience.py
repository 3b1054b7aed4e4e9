"""Lets ops of a rank on a GPU take as long as a case may, although its buffer has a short timeout."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.ranks import CASE_TIMEOUT_S

from moe_rt import Buffer

_TIMEOUT_AT = 16  # Control::timeout_ns (cuda/gpu/exchange.h), in bytes


@contextmanager
def patient(buffer: Buffer) -> Iterator[None]:
    """Launches in the block wait without the buffer's timeout, so that ops of healthy ranks succeed on a busy machine.

    Later ones have the timeout again. A rank that leaves the block first may still time out on a peer: let them meet.
    """
    engine: Any = buffer._engine
    timeout_ns = ctypes.c_int64.from_address(engine._launcher._control.address + _TIMEOUT_AT)
    before = int(engine.timeout_s * 1e9)
    assert timeout_ns.value == before
    timeout_ns.value = int(CASE_TIMEOUT_S * 1e9)
    try:
        yield
    finally:
        timeout_ns.value = before
