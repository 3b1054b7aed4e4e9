"""A command among stalls: its processes stop and go on, and its status is passed on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

STALLS = Path(__file__).parents[2] / "tools/stalls.py"
sys.path.append(str(STALLS.parent))

from stalls import go_on, stops  # noqa: E402

COUNTS = """
import signal, sys
stalls = []
def goes_on(*_):
    stalls.append(1)
    if len(stalls) == 3:
        sys.exit(7)
signal.signal(signal.SIGCONT, goes_on)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("command", "status"), [(["true"], 0), (["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, COUNTS], 7)]
)
def test_children_stop_and_go_on(command: list[str], status: int) -> None:
    assert subprocess.run([sys.executable, STALLS, "--share", "0.2", *command], timeout=600).returncode == status


def test_what_is_stopped_already_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        one = psutil.Process(process.pid)
        assert stops(one)
        while one.status() != psutil.STATUS_STOPPED:
            pass
        assert not stops(one)
        go_on(one)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not stops(one), "it has ended"
