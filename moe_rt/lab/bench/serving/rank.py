"""One rank of a contestant: it installs its contestant before the engine is made, then answers loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch


class Clock:
    """Nanoseconds of calls, in pairs: before the experts of a layer, and after them."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._ops: list[int] = []

    def watch(self, adapter: type, buffer: type | None = None) -> None:
        """Start timing all objects of these classes."""
        for name in ("prepare", "finalize"):
            setattr(adapter, name, _timed(getattr(adapter, name), self._layers))
        for name in ("dispatch", "combine") if buffer else ():
            setattr(buffer, name, _timed(getattr(buffer, name), self._ops))

    def clear(self) -> None:
        self._layers.clear()
        self._ops.clear()

    def layers(self) -> list[int]:
        """Time inside prepare and finalize, per layer."""
        return _pairs(self._layers)

    def ops(self) -> list[int]:
        """The part of layers() inside the buffer's dispatch and combine; empty without a buffer."""
        return _pairs(self._ops)


def _pairs(times: list[int]) -> list[int]:
    return [before + after for before, after in zip(times[::2], times[1::2], strict=True)]


def _timed(call: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter_ns()
        result = call(*args, **kwargs)
        times.append(perf_counter_ns() - start)
        return result

    return timed


CONTESTANTS = ("moe_rt", "shm", "gloo", "stock")
NEED_AVX512 = {"shm"}  # vLLM has no shared-memory collectives in its library for AVX2


def contestants_here() -> tuple[str, ...]:
    """Return the contestants that run on this processor."""
    left_out = NEED_AVX512 if torch.backends.cpu.get_cpu_capability() == "AVX2" else set()
    return tuple(name for name in CONTESTANTS if name not in left_out)


_CLOCK = Clock()  # one per process: engines create their layers internally


def become(contestant: str, ranks: int) -> None:
    """Install the contestant in the rank's process. `stock` is one rank with the cores of all."""
    if contestant == "stock":
        torch.set_num_threads(ranks)
        return
    from moe_rt.lab.bench.serving import collectives

    if contestant == "gloo":
        collectives.install_gloo()
        _CLOCK.watch(collectives.GlooPrepareAndFinalize)
    elif contestant == "shm":
        collectives.install_shm()
        _CLOCK.watch(collectives.ShmPrepareAndFinalize)
    else:
        from moe_rt.buffer.buffer import Buffer
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
