"""Lets gloo's threads come to rest before Python ends.

A thread of gloo holds the tensors of an operation a moment longer than the operation lasts. Where its hold is the last
one and the interpreter ends meanwhile, Python before 3.14 ends the thread in C++ code that must not be left so, and the
process aborts ("terminate called without an active exception") after all its work was done:
https://github.com/pytorch/pytorch/pull/179291. destroy_process_group() ends the threads only where nothing else holds
the group; DDP and the caches of DTensor do.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_PATIENCE_S = 10.0


@functools.cache
def rest_at_exit() -> None:
    """From now on the end of Python waits until gloo's threads are at rest, or for ten seconds."""
    atexit.register(_rest)


def _rest() -> None:
    deadline = time.monotonic() + _PATIENCE_S
    before, now = None, _looks()
    while now and not (now == before and all(state == "S" for state, *_ in now.values())):
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)  # without the interpreter's lock: who waits for it gets it, and runs
        before, now = now, _looks()


def _looks() -> dict[str, tuple[str, str, str]]:
    """What each of gloo's threads does, and how often it has stopped; one at rest shows the same each time.

    One that waits for the interpreter's lock, or for a core, does not: it has run in between, or it is to run now.
    """
    looks = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            lines = (thread / "status").read_text().splitlines()
        except OSError:
            continue  # it has ended
        of = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if of["Name"] == _NAME:
            looks[thread.name] = (of["State"][0], of["voluntary_ctxt_switches"], of["nonvoluntary_ctxt_switches"])
    return looks
