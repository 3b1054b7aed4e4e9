"""A server whose ranks freeze or are late, whose processes are killed, or that is terminated: nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serving.fault_times import BEYOND_THE_START, TIMEOUT_S
from serving.prompts import LENGTHS, PROMPTS, gathered, tokens

from moe_rt.lab.testing.serving.server import END_S, Server

Start = Callable[..., Server]
LONG = 900  # tokens per answer


@pytest.fixture
def start(model: Callable[[str], Path], tmp_path: Path) -> Iterator[Start]:
    """Return start(*flags, fault, **options), which starts a server; `fault` is its MOE_RT_FAULT."""
    servers = []

    def make(*flags: str, fault: str = "", **options: Any) -> Server:
        flags = ("--additional-config", json.dumps({"moe_rt": options}), *flags)
        servers.append(Server(model("qwen3_moe"), tmp_path / "log", *flags, environment={"MOE_RT_FAULT": fault}))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@contextmanager
def amid_requests(server: Server) -> Iterator[list[Future[tuple[int, list[int]]]]]:
    """Yield requests that are all being answered; the caller must end them in any way before it leaves."""
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        asked = [clients.submit(server.complete, prompt, LONG) for prompt in PROMPTS]
        assert server.await_running(len(PROMPTS))
        yield asked


def ended_with(asked: list[Future[tuple[int, list[int]]]]) -> set[int]:
    """Return the statuses; 0 for a broken connection."""
    return {0 if one.exception(END_S) else one.result()[0] for one in asked}


def stopped(server: Server) -> list[int]:
    """Wait until a process is stopped; return all stopped processes."""
    deadline = time.monotonic() + END_S
    while not server.processes("T"):
        assert time.monotonic() < deadline, server.log[-4000:]
        time.sleep(0.02)
    return server.processes("T")


def test_a_rank_that_freezes_in_a_layer(start: Start) -> None:
    server = start(fault=f"rank=1,op={BEYOND_THE_START},at=mid_payload,do=stop", timeout_s=TIMEOUT_S)
    server.await_ready()
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert set(clients.map(lambda prompt: server.complete(prompt, LONG)[0], PROMPTS)) == {500}
    assert "PeerTimeout: " in server.log
    assert "rank 1 has not announced" in server.log
    assert server.await_end()


def test_a_rank_that_freezes_anywhere(start: Start) -> None:
    """A rank that freezes anywhere fails all requests, also if the others wait in vLLM's all-reduce between steps."""
    server = start("--cpu-distributed-timeout-seconds", "30", timeout_s=TIMEOUT_S)
    server.await_ready()
    with amid_requests(server) as asked:
        os.kill(server.workers()[1], signal.SIGSTOP)
        assert ended_with(asked) == {500}
    assert server.await_end()


def test_a_rank_that_comes_late(start: Start, engines: Callable[..., Any]) -> None:
    server = start(fault="rank=1,op=1,at=pre_rendezvous,do=stop")
    os.kill(stopped(server)[0], signal.SIGCONT)
    server.await_ready()
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = list(clients.map(server.complete, PROMPTS, LENGTHS))
    expected = tokens(gathered(engines("qwen3_moe", 1, dtype="float32").generate([PROMPTS], [LENGTHS])))
    assert answers == [(200, answer) for answer in expected]


def test_a_rank_that_never_comes(start: Start) -> None:
    server = start(fault="rank=1,op=1,at=pre_rendezvous,do=stop", init_timeout_s=3.0)
    with pytest.raises(RuntimeError, match="the server did not start"):
        server.await_ready()
    assert "PeerTimeout: " in server.log
    assert "rank 1" in server.log
    assert server.await_end()


def named(server: Server, name: str) -> int:
    """Return the process of the server that has this name."""
    found = []
    for pid in server.processes():
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name.encode()):
                found.append(pid)
    (one,) = found
    return one


def test_a_killed_api_server(start: Start) -> None:
    """All processes end if the API server is killed; vLLM's would continue."""
    server = start()
    server.await_ready()
    with amid_requests(server) as asked:
        os.kill(server.pid, signal.SIGKILL)
        assert ended_with(asked) == {0}
    assert server.await_end()


def test_a_killed_coordinator(start: Start) -> None:
    """The server ends if its coordinator is killed; vLLM would answer /health with 200, and some requests never."""
    server = start()
    server.await_ready()
    os.kill(named(server, "VLLM::DPCoordinator"), signal.SIGKILL)
    assert server.await_end()
    assert "vLLM's coordinator was killed" in server.log


@pytest.mark.parametrize("interrupt", [False, True])
def test_asked_to_end_amid_requests(start: Start, interrupt: bool) -> None:
    """Ranks end on SIGTERM, which stops containers and reaches the first process, and on Ctrl-C, which reaches all.

    vLLM's front end may wait for requests whose ranks have ended, until their clients hang up. The ranks must end.
    """
    server = start()
    server.await_ready()
    with amid_requests(server) as asked:
        if interrupt:
            os.killpg(server.pid, signal.SIGINT)
        else:
            os.kill(server.pid, signal.SIGTERM)
        assert server.await_end(but=server.pid)
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGKILL)
        assert all(one.exception() or len(one.result()[1]) < LONG for one in asked)
    assert server.await_end()
