"""Time for requests to end after a rank of their server is killed: start a server, send requests, SIGKILL, repeat."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from moe_rt.bench.serving.loads import Load
from moe_rt.testing.serving.server import Server

LENGTH = 900  # tokens of an answer: more than are generated before the kill
REQUESTS_PER_RANK = 4


class NotEnded(Exception):
    """A request was answered, or broke off, although a rank had died."""


def kills(model: Path, logs: Path, ranks: int, number: int, seed: int, progress: Callable[[float], None]) -> Any:
    """Kill ranks in turn, each of a new server.

    Returns:
        ms: per kill, the time from the signal until the last request had ended.
        median, worst: of `ms`.
        requests: requests per server, all of which were being answered.
        told: number of servers that named the dead rank in their log.
    """
    times, told = [], 0
    for turn in range(number):
        server = Server(model, logs / f"server-{turn}", ranks=ranks)
        try:
            server.await_ready()
            times.append(1e3 * _kill_one(server, ranks, turn % ranks, seed))
            server.await_end()
            told += "moe_rt.errors.PeerDead" in server.log
        finally:
            server.close()
        progress(1 / number)
    requests = ranks * REQUESTS_PER_RANK
    return {"ms": times, "median": median(times), "worst": max(times), "requests": requests, "told": told}


def _kill_one(server: Server, ranks: int, rank: int, seed: int) -> float:
    """Seconds from the signal until the last request had ended."""
    prompts = Load.decode(REQUESTS_PER_RANK, 1).prompts(ranks, seed)
    with ThreadPoolExecutor(len(prompts)) as clients:
        asked = [clients.submit(_ended, server, prompt) for prompt in prompts]
        for prompt in prompts[:ranks]:  # a rank gets one request after the other, so now all have begun
            list(islice(server.streamed(prompt, LENGTH), 1))
        os.kill(server.workers()[rank], signal.SIGKILL)
        start = time.monotonic()
        return max(_failed(one) for one in asked) - start


def _ended(server: Server, prompt: list[int]) -> tuple[float, int]:
    status, _ = server.complete(prompt, LENGTH)
    return time.monotonic(), status


def _failed(asked: Future[tuple[float, int]]) -> float:
    ended, status = asked.result()
    if status != 500:
        raise NotEnded(f"got HTTP status {status} after a rank was killed, expected 500")
    return ended
