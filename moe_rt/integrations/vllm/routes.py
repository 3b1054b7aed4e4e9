"""Records each request's experts in vLLM on CPUs: with MOE_RT_VLLM_ROUTES=1 a finished output has `routed_experts`.

vLLM does this itself on GPUs (--enable-return-routed-experts), by a part that needs Triton. The result has the same
place and shape, [tokens, layers, K], but is int16: -3 marks tokens that came from a cache of prefixes. Layers without
experts hold zeros. The last token of a request was never run and has no row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config import CompilationMode
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from moe_rt.integrations.vllm import ROUTES
from moe_rt.routes.file import UNRECORDED

Rows = npt.NDArray[np.int16]
_rows: dict[str, Rows] = {}  # by request; its worker and its scheduler run in one process


class Recorder:
    """Keeps the experts of the tokens that one model runs.

    Args:
        runner: vLLM's model runner.
    """

    def __init__(self, runner: Any) -> None:
        config, model = runner.vllm_config, runner.vllm_config.model_config
        compiled = config.compilation_config.mode != CompilationMode.NONE
        if compiled and not config.parallel_config.enable_expert_parallel:
            raise ROUTES.unserved("a compiled model without --enable-expert-parallel", "--enforce-eager")
        if config.parallel_config.world_size > 1:
            raise ROUTES.unserved(f"{config.parallel_config.world_size} workers for one scheduler", "one")
        self._shape = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        self._step: dict[int, Tensor] | None = None  # outside a step, vLLM runs batches of dummies
        bind_routed_experts_capturer(runner.get_model(), self)

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Keep the experts of one layer's tokens; vLLM's routers call it."""
        if self._step is not None:
            self._step[layer_id] = topk_ids.to(torch.int16, copy=True)

    def run(self, execute: Callable[[], Any], runner: Any, scheduled: Any) -> Any:
        """Run a step, and store the experts of its tokens at their places in their requests."""
        for request in scheduled.finished_req_ids:
            _rows.pop(request, None)
        self._step = {}
        try:
            result = execute()
        finally:
            step, self._step = self._step, None
        first, batch = 0, runner.input_batch
        for at, request in enumerate(batch.req_ids if step else ()):
            count = scheduled.num_scheduled_tokens.get(request, 0)
            begin = int(batch.num_computed_tokens_cpu[at])
            rows = _with_room(_rows.get(request), begin + count, self._shape)
            rows[begin : begin + count] = 0
            for layer_id, ids in step.items():
                rows[begin : begin + count, layer_id] = ids[first : first + count].numpy()
            _rows[request] = rows
            first += count
        return result


def install() -> None:
    """Wrap vLLM's model runner and scheduler. Idempotent."""
    if getattr(GPUModelRunner.execute_model, "of_moe_rt", False):
        return
    GPUModelRunner.execute_model = recorded(GPUModelRunner.execute_model)
    Scheduler.update_from_output = attached(Scheduler.update_from_output)


def recorded(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Return GPUModelRunner.execute_model that records."""

    @functools.wraps(execute)
    def execute_and_record(runner: Any, scheduled: Any, *more: Any, **named: Any) -> Any:
        if not hasattr(runner, "moe_rt_recorder"):
            is_moe = runner.vllm_config.model_config.is_moe
            runner.moe_rt_recorder = Recorder(runner) if is_moe else None
        step = functools.partial(execute, runner, scheduled, *more, **named)
        return step() if runner.moe_rt_recorder is None else runner.moe_rt_recorder.run(step, runner, scheduled)

    execute_and_record.of_moe_rt = True  # type: ignore[attr-defined]
    return execute_and_record


def attached(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return Scheduler.update_from_output that gives finished outputs their experts."""

    @functools.wraps(update)
    def update_and_attach(scheduler: Any, *more: Any, **named: Any) -> Any:
        requests = dict(scheduler.requests)  # it forgets those that finish
        result = update(scheduler, *more, **named)
        for outputs in result.values():
            for output in outputs.outputs:
                rows = _rows.pop(output.request_id, None) if output.finish_reason is not None else None
                if rows is not None:
                    output.routed_experts = rows[: requests[output.request_id].num_tokens - 1].copy()
        return result

    return update_and_attach


def _with_room(rows: Rows | None, num_tokens: int, shape: tuple[int, int]) -> Rows:
    """Return rows [at least num_tokens, layers, K]; new ones are marked as not recorded."""
    have = 0 if rows is None else len(rows)
    if rows is not None and have >= num_tokens:
        return rows
    grown = np.full((max(num_tokens, 2 * have), *shape), UNRECORDED, np.int16)
    if rows is not None:
        grown[:have] = rows
    return grown
