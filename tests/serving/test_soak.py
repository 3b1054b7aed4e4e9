"""Random requests to a server of three ranks, some cut off by their clients: right answers, and no leaks.

For longer: MOE_RT_SOAK_MINUTES=5.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from serving.prompts import gathered, prompts, tokens

from moe_rt.lab.testing.serving.server import Server

MINUTES = float(os.environ.get("MOE_RT_SOAK_MINUTES", "0"))
SEED = int(os.environ.get("MOE_RT_SOAK_SEED", "0"))
REQUESTS = 162  # per batch; resources are counted between batches
BATCHES = 3  # at least, and for at least MINUTES
CLIENTS = 9
LONGEST = 48  # tokens per answer
KNOWN = 40  # prompts with known answers
PAUSE_S = 0.5
SETTLE_S = 30.0  # within it all ranks are idle, and cut-off requests are gone
# Growth of each process. Caches of torch and of the allocator grow for a while, and do not shrink.
MARGINS = {"descriptors": 2, "segments": 0, "shared memory": 0, "resident MiB": 100}


@pytest.fixture
def server(model: Callable[[str], Path], tmp_path: Path) -> Iterator[Server]:
    room = ("--kv-cache-memory-bytes", str(16 << 20))  # the cache is resident only once it has been filled
    running = Server(model("qwen3_moe"), tmp_path / "log", *room, ranks=3)
    running.await_ready()
    yield running
    running.close()


class Client:
    """A client with its own pace, whose requests follow from the seed."""

    def __init__(self, server: Server, asked: list[list[int]], expected: list[list[int]], seed: str) -> None:
        self._server, self._asked, self._expected = server, asked, expected
        self._draw = random.Random(seed)
        self.finished = self.given_up = 0

    def ask(self) -> None:
        """Send one request: whole, as a stream, or as a cut-off stream. Greedy answers are prefixes of longer ones."""
        draw, which, length = self._draw, self._draw.randrange(KNOWN), self._draw.randint(1, LONGEST)
        if draw.random() < 0.05:
            time.sleep(draw.random() * PAUSE_S)
        prompt, expected, kind = self._asked[which], self._expected[which], draw.choice(["whole", "stream", "leave"])
        if kind == "whole":
            assert self._server.complete(prompt, length) == (200, expected[:length])
        else:
            end = draw.randint(1, length) if kind == "leave" else None
            got = list(chain.from_iterable(islice(self._server.streamed(prompt, length), end)))
            assert got == expected[: len(got) if kind == "leave" else length]
        self.given_up += kind == "leave"
        self.finished += kind != "leave"


def held(server: Server) -> dict[str, list[int]]:
    """Return the resources of the server's processes, in their order."""
    counts: dict[str, list[int]] = {name: [] for name in MARGINS}
    for pid in sorted(server.processes()):
        maps = Path(f"/proc/{pid}/maps").read_text()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        counts["descriptors"].append(len(os.listdir(f"/proc/{pid}/fd")))
        counts["segments"].append(maps.count("memfd:moe_rt"))
        counts["shared memory"].append(maps.count("/dev/shm/"))
        counts["resident MiB"].append(pages * os.sysconf("SC_PAGESIZE") >> 20)
    return counts


def grown(first: dict[str, list[int]], last: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return by how much each process grew beyond the margins, for what grew."""
    more = {name: [b - a for a, b in zip(first[name], last[name], strict=True)] for name in MARGINS}
    return {name: counts for name, counts in more.items() if max(counts) > MARGINS[name]}


def settled(server: Server, first: dict[str, list[int]] | None) -> dict[str, list[int]]:
    """Return the resources once they are those of the first time within the margins; the first time, once they do not
    change.
    """
    deadline, before, counts = time.monotonic() + SETTLE_S, None, held(server)
    while (grown(first, counts) if first else counts != before) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
        before, counts = counts, held(server)
    return counts


@pytest.mark.timeout(900 + 120 * MINUTES)
def test_random_requests(server: Server, engines: Callable[..., Any], tell: Callable[[str], None]) -> None:
    asked = prompts(*(random.Random(SEED).choices(range(1, 120), k=KNOWN)), seed=SEED)
    stock = engines("qwen3_moe", 1, dtype="float32")
    expected = tokens(gathered(stock.generate([asked], [[LONGEST] * KNOWN])))
    clients = [Client(server, asked, expected, f"{SEED} {number}") for number in range(CLIENTS)]
    start, counts = time.monotonic(), list[dict[str, list[int]]]()
    with ThreadPoolExecutor(CLIENTS) as threads:
        while len(counts) < BATCHES or time.monotonic() - start < 60 * MINUTES:
            list(threads.map(lambda client: [client.ask() for _ in range(REQUESTS // CLIENTS)], clients))
            counts.append(settled(server, counts[0] if counts else None))
    summary = f"{sum(c.finished for c in clients)} finished, {sum(c.given_up for c in clients)} given up"
    tell(f"soak, seed {SEED}: {summary}, {time.monotonic() - start:.0f} s; held at last: {counts[-1]}")
    tell(f"MiB of the largest process after each batch: {[max(count['resident MiB']) for count in counts]}")
    assert grown(counts[0], counts[-1]) == {}
    assert sum(counts[0]["segments"]) >= 3 * 3  # each rank has all three segments
