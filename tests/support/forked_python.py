"""Python programs that start in milliseconds: each is forked from a process that has only imported torch.

Importing torch takes two seconds of a core, more than most test programs need for everything else. A program has its
arguments, directory, environment and a new session, and ends as any other does. It must import torch itself to use it,
as usual; the import only takes no time. `commands()` has a python, a torchrun and a moe-rt that do the same for
programs that start others; torchrun starts ranks with $PYTHON_EXEC.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

LIMIT_S = 3000.0  # for hangs only
SERVER = Path(__file__).with_name("python_server.py")
# Represents a program: it forwards signals to it and ends with its status; killing it kills the program. The shell's
# line is a string to Python, because after #! the kernel accepts no path with spaces and no long one.
COMMAND = """#!/bin/sh
'''exec' {quoted} -IS "$0" "$@"
'''
import json, os, signal, socket, sys
name = os.path.basename(sys.argv[0])
words = [*([] if name == "python" else [os.path.join({binaries!r}, name)]), *sys.argv[1:]]
if not words or words[0][0] == "-" and words[0] not in ("-m", "-c"):
    while words and words[0] == "-u":
        del words[0]
    if not words or words[0][0] == "-" and words[0] not in ("-m", "-c"):
        os.execv({python!r}, [{python!r}, *words])
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
forwarded = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # the program may run before the handlers are set
asked.connect({path!r})
socket.send_fds(asked, [json.dumps([words, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
asked.recv(64)
for number in forwarded:
    signal.signal(number, lambda number, _: asked.send(str(number).encode()))
signal.pthread_sigmask(signal.SIG_SETMASK, before)
status = int(asked.recv(64))
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def run_python(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run([sys.executable, *arguments], capture_output=True, text=True); its whole session ends with
    it.

    Args:
        arguments: a script, or -m and a module, or -c and a text, followed by the program's arguments. Python has no
            other options here, and of the variables for Python itself only PYTHONPATH has an effect.

    Raises:
        subprocess.TimeoutExpired: the program ran past `limit_s` and was killed; it contains its output so far.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory(prefix="moe_rt-python-") as directory, ExitStack() as opened:
        said = [Path(directory, name) for name in ("stdout", "stderr")]
        files = [opened.enter_context(open(os.devnull)), *(opened.enter_context(path.open("a")) for path in said)]
        asked = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        asked.connect(str(commands() / "socket"))
        message = json.dumps([words, str(cwd or Path.cwd()), dict(os.environ if env is None else env)]).encode()
        socket.send_fds(asked, [message], [file.fileno() for file in files])
        asked.recv(64)
        asked.settimeout(limit_s)
        try:
            status = int(asked.recv(64))
        except TimeoutError:
            status = None
        stdout, stderr = (path.read_text(errors="replace") for path in said)
    if status is None:
        raise subprocess.TimeoutExpired(words, limit_s, stdout, stderr)
    return subprocess.CompletedProcess(words, status, stdout, stderr)


@functools.cache
def commands() -> Path:
    """Return a directory of commands, and of the server's socket. The server ends with this process."""
    directory = Path(tempfile.mkdtemp(prefix="moe_rt-python-"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(directory / "socket"))
    listener.listen(100)
    server = subprocess.Popen(
        [sys.executable, SERVER, str(listener.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    listener.close()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(server.communicate)
    binaries = str(Path(sys.executable).parent)
    for name in ("python", "torchrun", "moe-rt"):
        command = directory / name
        command.write_text(
            COMMAND.format(
                quoted=shlex.quote(sys.executable),
                python=sys.executable,
                binaries=binaries,
                path=str(directory / "socket"),
            )
        )
        command.chmod(0o755)
    return directory
