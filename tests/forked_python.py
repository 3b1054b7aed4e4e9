"""Python programs that start in milliseconds: each is forked from a process that has imported torch and nothing else.

Importing torch takes two seconds of a core, more than most programs of tests take for all the rest. A program finds the
arguments, the directory, the environment and a session of its own, and ends as any other does. It must import torch by
itself to use it, as it would anywhere; only that this takes no time is new to it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LIMIT_S = 3000.0  # of hangs alone
# One program after the other: its id, and when it has ended its status, as a line each.
SERVER = """
import json, os, runpy, sys
import torch
for line in sys.stdin:
    arguments, directory, environment, files = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    raise SystemExit
os.setsid()
os.chdir(directory)
os.environ.clear()
os.environ.update(environment)
for stream, (file, flags) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY))):
    opened = os.open(file, flags | (os.O_APPEND if stream else 0))
    os.dup2(opened, stream)
    os.close(opened)
del torch, json, child, line, directory, environment, files, stream, file, flags, opened
if arguments[0] == "-m":
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
elif arguments[0] == "-c":
    sys.argv = ["-c", *arguments[2:]]
    exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
else:
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
"""


def run_python(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run([sys.executable, *arguments], capture_output=True, text=True). All of its session ends with it.

    Args:
        arguments: of Python: a script, or -m and a module, or -c and a text, and then the program's own. There are no
            others, and no variable of the environment that changes Python itself is heeded.

    Raises:
        subprocess.TimeoutExpired: it had not ended after so long, and was ended; it holds what the program had said.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory(prefix="moe_rt-python-") as directory:
        said = [Path(directory, name) for name in ("stdout", "stderr")]
        for path in said:
            path.touch()
        asked = [words, str(cwd or Path.cwd()), dict(os.environ if env is None else env), [os.devnull, *map(str, said)]]
        status = _ended(asked, limit_s)
        stdout, stderr = (path.read_text(errors="replace") for path in said)
    if status is None:
        raise subprocess.TimeoutExpired(words, limit_s, stdout, stderr)
    return subprocess.CompletedProcess(words, status, stdout, stderr)


def _ended(asked: Sequence[object], limit_s: float) -> int | None:
    """The program's exit status, negative for a signal; None where it has been ended for the time it took."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(asked).encode() + b"\n")
    leader = int(server.stdout.readline())
    in_time = bool(select.select([server.stdout], [], [], limit_s)[0])
    with suppress(ProcessLookupError):
        if not in_time:
            os.kill(leader, signal.SIGKILL)  # it may not lead its session yet
        os.killpg(leader, signal.SIGKILL)  # and what it has left running
    status = int(server.stdout.readline())
    return status if in_time else None


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """It ends when its input does: with this process. Without buffers, which select would not look into."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, start_new_session=True)
    atexit.register(server.communicate)
    return server
