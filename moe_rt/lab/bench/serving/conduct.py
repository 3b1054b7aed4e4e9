"""Runs the contestants: `python -m moe_rt.lab.bench.serving.conduct DIRECTORY` runs DIRECTORY/job.json.

It imports vLLM once and forks all ranks of all contestants, or starts servers and kills a rank of each. It prints lines
of JSON: {"progress": fraction of a load or of all kills} and {"record": of a load or of the kills}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from moe_rt.lab.bench.serving.loads import Load, Turn, summarise
from moe_rt.lab.bench.serving.rank import answer, become
from moe_rt.lab.testing.endings import Signals
from moe_rt.lab.testing.programs import end_with_starter
from moe_rt.lab.testing.serving import import_vllm
from moe_rt.lab.testing.serving.engines import EngineRanks
from moe_rt.lab.testing.serving.models import save_apart
from moe_rt.lab.testing.serving.server import Server

LENGTH = 900  # tokens of an answer: more than are generated before the kill
REQUESTS_PER_RANK = 4
ATTEMPTS = 10


class NotEnded(Exception):
    """A request was answered, or broke off, although a rank had died."""


def kills(model: Path, logs: Path, ranks: int, number: int, seed: int, progress: Callable[[float], None]) -> Any:
    """Kill ranks in turn, each of a new server.

    Returns:
        ms: per kill, the time from the signal until the last request had ended.
        median, worst: of `ms`.
        requests: requests per server, all of which were being answered.
        named: number of servers that named the dead rank in their log.
    """
    times, named = [], 0
    for turn in range(number):
        server = Server(model, logs / f"server-{turn}", ranks=ranks)
        try:
            server.await_ready()
            times.append(1e3 * _kill_one(server, ranks, turn % ranks, seed))
            server.await_end()
            named += "moe_rt.errors.PeerDead" in server.log
        finally:
            server.close()
        progress(1 / number)
    requests = ranks * REQUESTS_PER_RANK
    return {"ms": times, "median": median(times), "worst": max(times), "requests": requests, "named": named}


def _kill_one(server: Server, ranks: int, rank: int, seed: int) -> float:
    """Seconds from the signal until the last request had ended."""
    prompts = Load.decode(REQUESTS_PER_RANK, 1).prompts(ranks, seed)
    victim = server.workers()[rank]
    with ThreadPoolExecutor(len(prompts)) as clients:
        for _ in range(ATTEMPTS):
            asked = [clients.submit(_ended, server, prompt) for prompt in prompts]
            for prompt in prompts[:ranks]:  # a rank gets one request after the other, so now all have begun
                list(islice(server.streamed(prompt, LENGTH), 1))
            os.kill(victim, signal.SIGSTOP)  # every token needs every rank, so no further answer is completed
            if not any(one.done() for one in asked):
                os.kill(victim, signal.SIGKILL)
                start = time.monotonic()
                return max(_failed(one) for one in asked) - start
            os.kill(victim, signal.SIGCONT)  # on a busy machine, answers may be complete before this thread runs
            wait(asked)
    raise NotEnded(f"got answers of {LENGTH} tokens before a rank was killed, {ATTEMPTS} times, expected longer ones")


def _ended(server: Server, prompt: list[int]) -> tuple[float, int]:
    status, _ = server.complete(prompt, LENGTH)
    return time.monotonic(), status


def _failed(asked: Future[tuple[float, int]]) -> float:
    ended, status = asked.result()
    if status != 500:
        raise NotEnded(f"got HTTP status {status} after a rank was killed, expected 500")
    return ended


@dataclass(frozen=True, kw_only=True)
class Job:
    """Loads to measure, or kills if there are any.

    Attributes:
        sizes: sizes of the model, by the names of Transformers' configuration.
        turns: turns of each contestant per load.
    """

    ranks: int
    sizes: dict[str, int]
    contestants: list[str]
    loads: list[Load]
    turns: int
    kills: int
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "loads": [Load(**load) for load in fields["loads"]]})


def compare(job: Job, model: Path, say: Callable[..., None]) -> None:
    """Run all contestants on all loads. `stock` runs first, so that errors unrelated to moe_rt appear there."""
    most = max(load.most_at_once for load in job.loads)
    with ExitStack() as running:
        contestants = {name: running.enter_context(_engines(name, job, model, most)) for name in job.contestants}
        for ranks in contestants.values():
            for said in ranks.started():
                _raise_failed(said)
        for load in job.loads:
            turns = _take_turns(contestants, load, job, lambda part: say(progress=part))
            say(record=summarise(load, job.ranks, turns))


def _engines(name: str, job: Job, model: Path, most: int) -> Any:
    size = 1 if name == "stock" else job.ranks
    longest = max(load.prompt + load.steps for load in job.loads) + 1
    most_sequences = max(load.sequences for load in job.loads)
    threads = str(job.ranks) if name == "stock" else "1"
    return EngineRanks(
        model, size, [("OMP_NUM_THREADS", threads)], partial(become, name, job.ranks), answer, dtype="float32",
        enable_prefix_caching=False, max_num_batched_tokens=job.ranks * most // size, max_model_len=longest,
        max_num_seqs=job.ranks * most_sequences // size, kv_cache_memory_bytes=256 << 20,
    )  # fmt: skip


def _take_turns(
    contestants: dict[str, EngineRanks], load: Load, job: Job, progress: Callable[[float], None]
) -> dict[str, list[Turn]]:
    """Alternate the contestants. The order rotates, so that none always follows the same neighbour. A first turn of
    each is a warm-up."""
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    names = list(contestants)
    for name in names:
        _turn(contestants[name], load, job)
    for turn in range(job.turns):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            turns[name].append(_turn(contestants[name], load, job))
            progress(1 / (job.turns * len(names)))
    return turns


def _turn(ranks: EngineRanks, load: Load, job: Job) -> Turn:
    prompts = load.prompts(job.ranks, job.seed)
    shares = [prompts[rank :: ranks.size] for rank in range(ranks.size)]
    lengths = [[1 + load.steps] * len(share) for share in shares]
    return [_raise_failed(said) for said in ranks.generate(shares, lengths, skip=int(load.steps > 0))]


def _raise_failed(said: Any) -> Any:
    if isinstance(said, Exception):
        raise said
    return said


def main() -> None:
    end_with_starter()
    directory = Path(sys.argv[1])
    job = Job.from_json((directory / "job.json").read_text())
    import_vllm("ERROR")
    model = save_apart("qwen3_moe", directory / "model", **job.sizes)

    def say(**message: object) -> None:
        print(json.dumps(message), flush=True)

    with Signals():  # servers are in separate sessions, so this process must end them
        if job.kills:
            say(record=kills(model, directory, job.ranks, job.kills, job.seed, lambda part: say(progress=part)))
        else:
            compare(job, model, say)


if __name__ == "__main__":
    main()
