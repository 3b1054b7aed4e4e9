"""Forks programs from a process that has imported torch; forked_python.py starts it, passes it a socket and sends
requests.

A client sends the arguments, the directory, the environment and three open files, and receives the process id and,
after the exit, the status. A number that it sends meanwhile is a signal; if it disconnects, the program is killed.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile

# Also import what torch imports at the first gradient, comparison or optimiser step, which would take each program
# seconds.
for name in ("torch", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"):
    importlib.import_module(name)


def serve(listener: socket.socket) -> list[str]:
    """Return only in new processes, with their arguments. Exit with the process that started this server and owns its
    input."""
    running: dict[int, int] = {}  # descriptor of a process -> its id
    asking: dict[int, socket.socket] = {}  # descriptor of a process -> its client
    while True:
        heard = {connection: process for process, connection in asking.items()}
        ready, _, _ = select.select([0, listener, *running, *heard], [], [])
        if 0 in ready:
            for pid in running.values():
                end(pid)
            raise SystemExit
        for process in running.keys() & set(ready):
            pid = running.pop(process)
            end(pid)  # its remaining children
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(process)
            if connection := asking.pop(process, None):
                tell(connection, status)
                connection.close()
        for connection in heard.keys() & set(ready):
            if heard[connection] not in running:
                continue
            if message := connection.recv(64):
                os.kill(running[heard[connection]], int(message))
            else:
                end(running[heard[connection]])
                asking.pop(heard[connection]).close()
        if listener in ready:
            connection, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            pid = os.fork()
            if pid == 0:
                for other in (listener, connection, *asking.values()):
                    other.close()
                return become(json.loads(message), [*files, *running])
            for number in files:
                os.close(number)
            tell(connection, pid)
            process = os.pidfd_open(pid)
            running[process], asking[process] = pid, connection


def tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client may have disconnected
        connection.send(str(number).encode())


def end(pid: int) -> None:
    """Kill the process and its session."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not lead a session yet
        os.killpg(pid, signal.SIGKILL)


def become(asked: list, files: list[int]) -> list[str]:
    """Give the new process a session, a directory, an environment and three files, and close all others."""
    arguments, directory, environment = asked
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for stream, number in enumerate(files[:3]):
        os.dup2(number, stream)
    for number in files:
        os.close(number)
    tempfile.tempdir = None  # an import may have cached the directory
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return arguments


gc.freeze()  # for the programs: garbage collection would touch, and so copy, all imported objects
arguments = serve(socket.socket(fileno=int(sys.argv[1])))
sys.path[0] = ""
if arguments[0] == "-m":
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
elif arguments[0] == "-c":
    sys.argv = ["-c", *arguments[2:]]
    exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
else:
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
