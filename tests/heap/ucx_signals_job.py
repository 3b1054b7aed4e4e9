"""Prints the signals, and the names of the limits, that change once heap "ucx" has a network: a JSON list."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

from support.routing import make_spec

from moe_rt import _engine
from moe_rt.memory import ucx


def signals() -> dict[int, tuple[bool, ...]]:
    """Return whether each signal is blocked, ignored and caught. The C library reserves some for its threads."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    masks = [int(fields[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt")]
    return {number: tuple(bool(mask >> (number - 1) & 1) for mask in masks) for number in signal.valid_signals()}


def limits() -> dict[str, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def main() -> None:
    before = {**signals(), **limits()}
    fd = os.memfd_create("segment")
    shape = make_spec(2).shape()
    os.ftruncate(fd, shape.segment_bytes())
    network = _engine.UcxNetwork(library=ucx.library(), descriptor=fd, shape=shape, rank=0)
    after = {**signals(), **limits()}
    assert network.address()
    print(json.dumps([what for what, how in after.items() if before[what] != how]))


main()
