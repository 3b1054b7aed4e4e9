"""The serving step of gpucheck, rehearsed: its layer on the emulated GPU, its prompt on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.emulated_gpu import EmulatedGpu
from torch import Tensor
from vllm.model_executor.layers import fused_moe

from moe_rt.lab.check import serving
from moe_rt.lab.check.steps import STEPS, Check, perform
from moe_rt.lab.testing.rounds import WrongOutput


def plain_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Compute vLLM's fused experts, whose kernels are for GPUs."""
    out = torch.zeros(x.shape)
    local = ids if expert_map is None else expert_map[ids]
    for expert in range(len(gate_up)):
        gate, up = (x.float() @ gate_up[expert].float().T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].float().T
        chosen = local == expert
        out += torch.where(chosen.any(1, keepdim=True), (chosen * weights).sum(1, keepdim=True) * y, 0)
    return out.to(x.dtype)


def test_experts_of_ranks_equal_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_moe, "fused_experts", plain_experts)
    record = perform(STEPS["serving"], Check(EmulatedGpu(), seconds=600))
    assert (record["result"], record["error"]) == ("ok", "")
    assert record["detail"].endswith(serving.ONE_GPU)


def test_experts_of_another_rank_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def misplaced(*args: Any, expert_map: Tensor | None = None, **kwargs: Any) -> Tensor:
        return plain_experts(*args, expert_map=None if expert_map is None else expert_map.roll(1), **kwargs)

    monkeypatch.setattr(fused_moe, "fused_experts", misplaced)
    with pytest.raises(WrongOutput, match="experts: got a difference of"):
        serving.run_experts(EmulatedGpu(), seconds=600)


def test_a_prompt_is_answered_as_stock_does() -> None:
    """A prompt on CPU ranks is answered as by stock vLLM; on a machine with GPUs the same process uses them."""
    assert serving.run_prompt("float32", [False], 900) == "2 ranks of vLLM served a prompt as one does"


def test_a_process_that_fails_is_quoted() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)serving process: got one that fails.*no_such_dtype"):
        serving.run_prompt("no_such_dtype", [], 900)
