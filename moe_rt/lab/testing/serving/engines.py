"""vLLM engines as data-parallel ranks, forked from a process that has imported vLLM: they start in seconds.

A rank gets orders as JSON, one by one: {"prompts": [[id]], "lengths": [int], "more": arguments of SamplingParams}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.ports import free_ports
from moe_rt.lab.testing.process_ranks import ProcessRanks

START_S = 600.0  # an engine starts within ten seconds on an idle core
ANSWER_S = 600.0
AFTER_FAILURE_S = 60.0
ENGINE = dict(
    enforce_eager=True, max_model_len=1024, max_num_seqs=16, seed=0, disable_log_stats=True, skip_tokenizer_init=True,
    kv_cache_memory_bytes=64 << 20, distributed_executor_backend="uni",
)  # fmt: skip


Answer = Callable[[Any, dict[str, Any]], Any]


class Failed(Exception):
    """The exception that a rank raised, with its traceback."""


class EngineRanks:
    """Engines of one model, each a rank.

    Args:
        model: directory where the model is saved.
        size: number of ranks; one runs vLLM without moe_rt.
        engine: arguments of vllm.LLM in addition to ENGINE, which they override.
        environment: additions to the ranks' environment, as pairs; MOE_RT_VLLM=1 unless there is one rank.
        before: called in each rank before its engine is made.
        answer: computes a rank's answer from its engine and an order.
    """

    def __init__(
        self,
        model: Path,
        size: int,
        environment: Sequence[tuple[str, str]] = (),
        before: Callable[[], object] = lambda: None,
        answer: Answer | None = None,
        **engine: Any,
    ) -> None:
        self.size = size
        self._ranks = ProcessRanks()
        port = free_ports(10)  # as many as vLLM reserves for its groups, each of which takes the next one
        variables = {"MOE_RT_VLLM": str(int(size > 1)), **dict(environment)}
        if size > 1:
            engine = {"enable_expert_parallel": True, **engine}
        for rank in range(size):
            place = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": size, "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
            places = {f"VLLM_DP_{name}": str(value) for name, value in place.items()} if size > 1 else {}
            arguments = {**variables, **places}, before, answer or generate, str(model), {**ENGINE, **engine}
            self._ranks.start(rank, _serve, *arguments)

    def started(self) -> list[Any]:
        """Return each rank's message once its engine is made: nothing, or a Failed.

        Peers of an engine that fails may wait for it for as long as vLLM does: they get AFTER_FAILURE_S.
        """
        said: dict[int, Any] = {}
        while missing := [rank for rank in range(self.size) if rank not in said]:
            limit = AFTER_FAILURE_S if any(said.values()) else START_S
            self._ranks.has_news(missing, limit)
            ready = [rank for rank in missing if self._ranks.has_news([rank])]
            said |= {rank: self._receive(rank, ANSWER_S if ready else 0.0) for rank in ready or missing}
        return [said[rank] for rank in range(self.size)]

    def generate(
        self, prompts: Sequence[Sequence[list[int]]], lengths: Sequence[Sequence[int]], **more: Any
    ) -> list[Any]:
        """Return for each rank its prompts' answers, or a Failed."""
        self.ask(prompts, lengths, **more)
        return [self.answer(rank) for rank in range(self.size)]

    def ask(self, prompts: Sequence[Sequence[list[int]]], lengths: Sequence[Sequence[int]], **more: Any) -> None:
        for rank in range(self.size):
            order = {"prompts": prompts[rank], "lengths": lengths[rank], "more": more}
            self._ranks.send(rank, json.dumps(order).encode())

    def answer(self, rank: int) -> Any:
        return self._receive(rank, ANSWER_S)

    def send_signal(self, rank: int, number: int) -> None:
        self._ranks.send_signal(rank, number)

    def close(self) -> None:
        for rank in range(self.size):
            self._ranks.hang_up(rank)
        for rank in range(self.size):
            self._ranks.await_end(rank, 30.0)
        self._ranks.close()

    def __enter__(self) -> EngineRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _receive(self, rank: int, timeout_s: float) -> Any:
        try:
            answer = json.loads(self._ranks.receive(rank, timeout_s))
        except (EOFError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._ranks.send_signal(rank, signal.SIGUSR1)
            return Failed(f"rank {rank}: {type(error).__name__}")
        return Failed(answer["failed"]) if "failed" in answer else answer["answer"]


def _serve(
    channel: Channel,
    variables: dict[str, str],
    before: Callable[[], object],
    answer: Answer,
    model: str,
    engine: dict[str, Any],
) -> None:
    os.environ.update(variables)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        from vllm import LLM

        from moe_rt.integrations.vllm import register

        register()
        before()
        llm = LLM(model, **engine)
        channel.send(b'{"answer": null}')
        with contextlib.suppress(EOFError):
            for order in iter(channel.receive, None):
                channel.send(json.dumps({"answer": answer(llm, json.loads(order))}).encode())
    except BaseException:
        channel.send(json.dumps({"failed": traceback.format_exc()}).encode())
        raise


def generate(llm: Any, order: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each request's tokens and, if requested, log-probabilities of the likeliest tokens and of the prompt."""
    from vllm import SamplingParams

    wanted = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, **order["more"])
        for n in order["lengths"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
    return [_answer(done) for done in llm.generate(prompts, wanted, use_tqdm=False)]


def _answer(done: Any) -> dict[str, Any]:
    made, read = done.outputs[0], done.prompt_logprobs or []
    return {
        "tokens": list(made.token_ids),
        "logprobs": [{str(token): p.logprob for token, p in step.items()} for step in made.logprobs or []],
        "of_prompt": [step[token].logprob for token, step in zip(done.prompt_token_ids, read, strict=False) if step],
    }


@dataclass(frozen=True)
class Parting:
    """The first difference between two answers.

    Attributes:
        step: step of the first different token; of the last token if all are equal.
        same: True if all tokens are equal.
        apart: difference of the log-probabilities that the two engines gave the second one's token at that step.
    """

    step: int
    same: bool
    apart: float


def parting(wanted: dict[str, Any], got: dict[str, Any]) -> Parting:
    """Compare two answers of `moe_rt.lab.testing.serving.engines.generate` to the same prompt, with log-probabilities.

    `apart` is infinite for a token that is not among the likeliest tokens that the first engine was asked for.
    """
    pairs = list(zip(wanted["tokens"], got["tokens"], strict=True))
    step = next((i for i, (token, other) in enumerate(pairs) if token != other), len(pairs) - 1)
    other = str(pairs[step][1])
    apart = abs(wanted["logprobs"][step].get(other, float("-inf")) - got["logprobs"][step][other])
    return Parting(step, pairs[step][0] == pairs[step][1], apart)
