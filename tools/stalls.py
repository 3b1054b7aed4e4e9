"""Stops random processes of a command for random times: a test whose verdict depends on timing then fails.

Usage: python tools/stalls.py [--seed N] [--share 0.03] make pytest

A busy machine stalls a rank between any two lines, but rarely. Here each process stops about once a second. The exit
status is that of the command. Tests that stop ranks themselves (`moe-rt chaos --action freeze`) may fail, as this
program may let such a rank go on too early.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from contextlib import suppress

import psutil

LOOK_S = 0.02  # between two looks at all processes
MEAN_S, LONGEST_S = 0.08, 0.6  # of a stall
RUNNING = {psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP}


def main() -> int:
    """Run the command among stalls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.03, help="of all processes, stopped at each look")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    stopped: dict[psutil.Process, float] = {}  # and when each goes on
    with subprocess.Popen(asked.command) as process:
        root = psutil.Process(process.pid)
        try:
            while process.poll() is None:
                for one in [one for one, end in stopped.items() if end <= time.monotonic()]:
                    go_on(one)
                    del stopped[one]
                with suppress(psutil.NoSuchProcess):
                    for one in root.children(recursive=True):
                        if rng.random() < asked.share and stops(one):
                            stopped[one] = time.monotonic() + min(rng.expovariate(1 / MEAN_S), LONGEST_S)
                time.sleep(LOOK_S)
        finally:
            for one in stopped:
                go_on(one)
    return process.returncode


def stops(one: psutil.Process) -> bool:
    """Stop a process; False if it is stopped already or has ended."""
    with suppress(psutil.Error):
        if one.status() in RUNNING:
            one.suspend()
            return True
    return False


def go_on(one: psutil.Process) -> None:
    """Let a process go on, and an `nsenter` that has stopped itself together with it."""
    with suppress(psutil.Error):
        one.resume()
        parent = one.parent()
        if parent is not None and parent.name() == "nsenter":
            parent.resume()


if __name__ == "__main__":
    sys.exit(main())
