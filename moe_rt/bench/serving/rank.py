"""One rank of a contestant: it installs its contestant before the engine is made, then answers loads."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch

from moe_rt.bench.serving.clock import Clock

CONTESTANTS = ("moe_rt", "shm", "gloo", "stock")
_CLOCK = Clock()  # one per process: engines create their layers internally


def become(contestant: str, ranks: int) -> None:
    """Install the contestant in the rank's process. `stock` is one rank with the cores of all."""
    if contestant == "stock":
        torch.set_num_threads(ranks)
        return
    from moe_rt.bench.serving import gloo, shm

    if contestant == "gloo":
        gloo.install()
        _CLOCK.watch(gloo.GlooPrepareAndFinalize)
    elif contestant == "shm":
        shm.install()
        _CLOCK.watch(shm.ShmPrepareAndFinalize)
    else:
        from moe_rt.comm.buffer import Buffer
        from moe_rt.integrations.vllm.prepare_finalize import MoeRtPrepareAndFinalize

        _CLOCK.watch(MoeRtPrepareAndFinalize, Buffer)


def answer(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Return greedy tokens, and the times after the first `skip` steps of the engine.

    Returns:
        tokens: tokens of each request.
        span: start of the first measured step and end of the last.
        layers, ops: as in Clock, within this span.
    """
    from vllm import SamplingParams

    engine, skip = llm.llm_engine, order["more"]["skip"]
    for number, (prompt, length) in enumerate(zip(order["prompts"], order["lengths"], strict=True)):
        wanted = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, wanted)
    answers: dict[int, list[int]] = {}
    start, end, steps = 0, 0, 0
    while engine.has_unfinished_requests():  # ranks synchronise here
        if steps == skip:
            _CLOCK.clear()
            start = perf_counter_ns()
        for output in engine.step():
            answers[int(output.request_id)] = list(output.outputs[0].token_ids)
        end = perf_counter_ns()
        steps += 1
    return {
        "tokens": [answers[number] for number in range(len(order["prompts"]))],
        "span": [start, end],
        "layers": _CLOCK.layers(),
        "ops": _CLOCK.ops(),
    }
