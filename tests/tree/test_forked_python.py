"""Forked programs see and leave the same state as programs that are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.forked_python import LIMIT_S, run_python

TELLS = """
import json, os, sys, tempfile
here = {"argv": sys.argv, "path": sys.path[0], "directory": os.getcwd(), "variable": os.environ.get("VARIABLE")}
here |= {"name": __name__, "main": sys.modules["__main__"].__dict__ is globals() or "-c" in sys.argv}
here |= {"leads": os.getsid(0) == os.getpid(), "input": sys.stdin.read(), "home": os.environ.get("HOME")}
here |= {"temporary": tempfile.gettempdir()}
print(json.dumps(here))
"""


@pytest.mark.parametrize("how", ["script", "-c", "-m"])
def test_what_it_finds(tmp_path: Path, how: str) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    first = {"script": [str(tmp_path / "tells.py")], "-c": ["-c", TELLS], "-m": ["-m", "tells"]}[how]
    env = {"VARIABLE": "set", "PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    found = []
    for text in (
        run_python(*first, "one", "two", cwd=tmp_path, env=env).stdout,
        subprocess.run(
            [sys.executable, *first, "one", "two"], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, start_new_session=True,
        ).stdout,
    ):  # fmt: skip
        found.append(json.loads(text))
    forked, started = found
    if how == "-m":  # both found it in the directory
        assert Path(forked["argv"].pop(0)).resolve() == Path(started["argv"].pop(0)).resolve()
        assert forked.pop("path") in ("", started.pop("path"))
    assert forked == started
    assert forked["leads"]


def test_how_it_ends() -> None:
    ends = "import atexit, sys\natexit.register(print, 'over')\n"
    done = run_python("-c", ends + "print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\nover\n", "err\n")
    done = run_python("-c", ends + "def fails():\n    raise ValueError('why')\nfails()")
    assert (done.returncode, done.stdout) == (1, "over\n")
    assert done.stderr.endswith("in fails\nValueError: why\n")
    assert run_python("-c", "import os; os.kill(os.getpid(), 9)").returncode == -9
    assert run_python("-c", "pass").returncode == 0, "independent of the program before it"


def test_nothing_is_there_that_it_has_not_imported() -> None:
    done = run_python("-c", "import sys; print('moe_rt' in sys.modules); torch")
    assert done.stdout == "False\n"
    assert "NameError: name 'torch' is not defined" in done.stderr


def is_over(pid: str) -> bool:
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_it_leaves_running_ends_with_it() -> None:
    starts = "import os, subprocess; print(os.getpid(), subprocess.Popen(['sleep', '600']).pid)"
    pids, deadline = run_python("-c", starts).stdout.split(), time.monotonic() + LIMIT_S
    while not all(map(is_over, pids)):  # a kill takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_time_is_up() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", "import time; time.sleep(600)", limit_s=0.01)
    assert run_python("-c", "print(1)").stdout == "1\n", "it has ended, and the next program runs"
