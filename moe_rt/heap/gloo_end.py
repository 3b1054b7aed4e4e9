"""Waits until gloo's threads are idle before Python ends.

A gloo thread refers to the tensors of an operation slightly longer than the operation lasts. If its reference is the
last one and the interpreter ends meanwhile, Python before 3.14 ends the thread inside C++ code that must not be left
this way, and the process aborts ("terminate called without an active exception") after all its work was done:
https://github.com/pytorch/pytorch/pull/179291. destroy_process_group() ends the threads only if nothing else refers to
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
    """Make the end of Python wait until gloo's threads are idle, for at most ten seconds."""
    atexit.register(_rest)


def _rest() -> None:
    deadline = time.monotonic() + _PATIENCE_S
    before, now = None, _looks()
    while now and not (now == before and all(state == "S" for state, *_ in now.values())):
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)  # releases the interpreter's lock: a thread that waits for it runs
        before, now = now, _looks()


def _looks() -> dict[str, tuple[str, str, str]]:
    """State and context-switch counts of each gloo thread; those of an idle thread do not change.

    Those of a thread that waits for the interpreter's lock or a core do: it ran in between, or its state is not "S".
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
