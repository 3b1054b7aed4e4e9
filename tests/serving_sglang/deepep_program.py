"""SGLang's DeepEP dispatchers (normal, low latency and V2) as a CUDA program: sums of all experts on two ranks."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import sglang_stand_ins  # noqa: F401
import torch
import torch.distributed as dist
from sglang.srt import runtime_context
from sglang.srt.layers.moe.token_dispatcher import deepep, deepep_v2
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import DeepEPMode
from support.deepep_sums import EXPERTS, HIDDEN, TOPK, check, inputs


def v1(rank: int, local: int, mode: DeepEPMode) -> None:
    dispatcher = deepep.DeepEPDispatcher(
        group=dist.group.WORLD, router_topk=TOPK, num_experts=EXPERTS, num_local_experts=local, hidden_size=HIDDEN,
        params_dtype=torch.bfloat16, deepep_mode=mode, return_recv_hook=mode is DeepEPMode.LOW_LATENCY,
    )  # fmt: skip
    x, weights, ids = inputs(rank)
    got = dispatcher.dispatch(x, StandardTopKOutput(weights, ids, torch.empty(0)))
    rows, first = got.hidden_states, rank * local
    if mode is DeepEPMode.LOW_LATENCY:
        y = rows.float() * (1 + first + torch.arange(local)).view(local, 1, 1)
        back = deepep.DeepEPLLCombineInput(y.bfloat16(), got.topk_ids, got.topk_weights)
    else:
        factors = (got.topk_weights * (1 + first + got.topk_ids)).where(got.topk_ids >= 0, 0).sum(1, keepdim=True)
        back = deepep.DeepEPNormalCombineInput((rows.float() * factors).bfloat16(), got.topk_ids, got.topk_weights)
    check(rank, dispatcher.combine(back))


def v2(rank: int, local: int) -> None:
    impl = deepep_v2._DeepEPv2Impl(
        dist.group.WORLD, TOPK, EXPERTS, local, HIDDEN, SimpleNamespace(ue8m0=False, tma_aligned=False), 64, False
    )
    x, weights, ids = inputs(rank)
    got = impl.dispatch(x, StandardTopKOutput(weights, ids, torch.empty(0)))
    ends = got.psum_num_recv_tokens_per_expert.tolist()
    y, start = got.hidden_states.clone(), 0
    for expert, end in enumerate(ends):
        factors = got.topk_weights[start:end].unsqueeze(1) * (1 + rank * local + expert)
        y[start:end] = (y[start:end].float() * factors).bfloat16()
        start = -(-end // got.expert_alignment) * got.expert_alignment
    check(rank, impl.combine(deepep_v2.DeepEPv2CombineInput(y, None)))


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    local = EXPERTS // size
    moe = SimpleNamespace(deepep_v2_mode="direct", deepep_dispatcher_output_dtype="bf16")
    runtime_context._CONTEXT._config_bags = {"exec": SimpleNamespace(moe=moe)}  # as a server's arguments set them
    runtime_context._CONTEXT._server_args = SimpleNamespace()
    deepep.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True  # else SGLang's normal combine is not implemented
    with runtime_context.get_parallel().override(attn_dp_size=1, attn_cp_size=1, tp_size=size, tp_group=None):
        v2(rank, local)
        v1(rank, local, DeepEPMode.NORMAL)
        runtime_context.get_resources().buffers.clear()  # a process has one buffer, made for its first mode
        v1(rank, local, DeepEPMode.LOW_LATENCY)
    sys.stdout.write("passed\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
