"""A command among stalls: its processes stop and go on, and its status is passed on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

STALLS = Path(__file__).parents[2] / "tools/stalls.py"
sys.path.append(str(STALLS.parent))

import stalls  # noqa: E402
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


def test_none_stays_stopped_when_the_command_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    until_stopped = 'sleep 1000 & echo $!; until read -r _ _ state _ < /proc/$!/stat; [ "$state" = T ]; do :; done'
    for name in ("MEAN_S", "LONGEST_S"):
        monkeypatch.setattr(stalls, name, 1e9)
    monkeypatch.setattr(sys, "argv", ["stalls.py", "--share", "1", "sh", "-c", until_stopped])
    assert stalls.main() == 0
    one = psutil.Process(int(capfd.readouterr().out))
    status = one.status()
    one.kill()
    assert status != psutil.STATUS_STOPPED


def test_an_nsenter_that_has_stopped_itself_goes_on() -> None:
    gone_on: list[str] = []

    def named(name: str, parent: Any = None) -> Any:
        return SimpleNamespace(name=lambda: name, resume=lambda: gone_on.append(name), parent=lambda: parent)

    for parent in (named("nsenter"), named("sh"), None):
        go_on(named("rank", parent))
    assert gone_on == ["rank", "nsenter", "rank", "rank"]


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
