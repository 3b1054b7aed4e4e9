"""vLLM's DeepEP prepare and finalize classes as a CUDA program: sums of all experts on two ranks."""

from __future__ import annotations

import os
import sys

import deep_ep
import torch
import torch.distributed as dist
from support.deepep_sums import EXPERTS, HIDDEN, TOPK, check, inputs
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

MOST, BYTES = 16, int(1e9)


def sums(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int, local: int) -> torch.Tensor:
    """Return the rank's experts' sums of rows whose ids and weights are [N, K]; ids of other ranks add nothing."""
    here = (ids >= first) & (ids < first + local)
    factors = (weights * (1 + ids)).where(here, 0).sum(1, keepdim=True)
    return (rows.float() * factors).to(rows.dtype)


def ordinary(rank: int, size: int, layer: object, local: int) -> None:
    x, weights, ids = inputs(rank)
    rows, _, meta, row_ids, row_weights = layer.prepare(
        x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG
    )
    every = torch.cat([inputs(peer)[2] for peer in range(size)])
    counts = [int((every == rank * local + e).sum()) for e in range(local)]
    assert meta.expert_num_tokens.tolist() == counts
    y = sums(rows, row_ids, row_weights, rank * local, local)
    out = torch.empty_like(x)
    layer.finalize(out, y, row_weights, row_ids, False, TopKWeightAndReduceNoOP())
    check(rank, out)


def low_latency(rank: int, size: int, fp8: bool, local: int) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, size, EXPERTS)
    buffer = deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=hint, low_latency_mode=True)
    layer = DeepEPLLPrepareAndFinalize(buffer, MOST, size, use_fp8_dispatch=fp8)
    x, weights, ids = inputs(rank)
    rows, scales, _, _, _ = layer.prepare(x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG)
    assert scales is None
    factors = (1 + rank * local + torch.arange(local)).view(local, 1, 1)
    y = (rows.float() * factors).bfloat16()
    out = torch.empty_like(x)
    layer.finalize(out, y, weights, ids, False, TopKWeightAndReduceDelegate())
    if fp8:
        scale = x.float().abs().amax() * EXPERTS * 2**-4
        assert (out.float() - x.float() * (weights * (1 + ids)).sum(1, keepdim=True)).abs().max() < scale
    else:
        check(rank, out)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    local = EXPERTS // size
    buffer = deep_ep.Buffer(dist.group.WORLD, BYTES)
    ordinary(rank, size, DeepEPHTPrepareAndFinalize(buffer, size, size, rank * local), local)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK)
    ordinary(rank, size, DeepEPV2PrepareAndFinalize(elastic, size, size, rank * local, EXPERTS, TOPK), local)
    for fp8 in (False, True):
        low_latency(rank, size, fp8, local)
    sys.stdout.write("passed\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
