"""The OpenAI server on two ranks, started as users start it: answers, streams, cut-off requests, a killed worker."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from serving.prompts import LENGTHS, PROMPTS, gathered, tokens

from moe_rt.lab.testing.serving.server import Server


@pytest.fixture(scope="module")
def expected(engines: Callable[..., Any]) -> list[list[int]]:
    return tokens(gathered(engines("qwen3_moe", 1, dtype="float32").generate([PROMPTS], [LENGTHS])))


@pytest.fixture
def server(model: Callable[[str], Path], tmp_path: Path) -> Iterator[Server]:
    running = Server(model("qwen3_moe"), tmp_path / "log", as_users_start_it=True)
    try:
        running.await_ready()
        yield running
    finally:
        running.close()


def all_at_once(server: Server, ask: Callable[[list[int], int], Any], lengths: list[int] = LENGTHS) -> list[Any]:
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        return list(clients.map(ask, PROMPTS, lengths))


def test_answers_then_a_killed_worker(server: Server, expected: list[list[int]], tell: Callable[[str], None]) -> None:
    assert "MoeRtPrepareAndFinalize" in server.log
    assert all_at_once(server, server.complete) == [(200, answer) for answer in expected]
    streamed = all_at_once(server, lambda *request: list(server.streamed(*request)))
    assert [list(chain.from_iterable(parts)) for parts in streamed] == expected

    all_at_once(server, lambda prompt, length: list(islice(server.streamed(prompt, 500), 3)))  # clients that hang up
    assert all_at_once(server, server.complete) == [(200, answer) for answer in expected]

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        asked = [clients.submit(server.complete, prompt, 900) for prompt in PROMPTS]
        stream = server.streamed(PROMPTS[0], 900)
        next(stream)
        assert server.await_running(len(PROMPTS) + 1)
        os.kill(server.workers()[-1], signal.SIGKILL)
        start = time.monotonic()
        statuses = {one.result()[0] for one in asked}
        tell(f"all requests had ended {1e3 * (time.monotonic() - start):.0f} ms after the kill")
    assert statuses == {500}
    # The survivor was in an op of moe_rt, or in vLLM's all-reduce between two steps.
    assert re.search(
        r"PeerDead: \w+ #\d+ on rank \d: the process of rank \d ended|Worker.* died unexpectedly", server.log
    )
    assert server.await_end()
