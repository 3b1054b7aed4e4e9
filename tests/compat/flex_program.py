"""Megatron-Core's flex dispatcher with its back end deepep, as a CUDA program: rows, sums and gradients."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher, _DeepepManager
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, EXPERTS, TOPK, TOKENS = 128, 8, 2, 12


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=TOPK,
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep", add_bias_linear=False,
    )  # fmt: skip
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp, groups.tp_ep = dist.group.WORLD, None, dist.group.WORLD
    local = list(range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size))
    dispatcher = MoEFlexTokenDispatcher(len(local), local, config, groups)
    assert isinstance(dispatcher._comm_manager, _DeepepManager)
    torch.manual_seed(rank)
    for tokens in (TOKENS, TOKENS + 40):  # more than the first buffer held
        x = torch.randn(tokens, 1, HIDDEN, device="cuda").bfloat16().requires_grad_()
        scores = torch.rand(tokens, EXPERTS, device="cuda")
        routing_map = torch.zeros(tokens, EXPERTS, dtype=torch.bool, device="cuda")
        routing_map.scatter_(1, scores.topk(TOPK).indices, True)
        probs = (scores * routing_map).requires_grad_()
        hidden, token_probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, row_probs = dispatcher.token_dispatch(hidden, token_probs)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        every = [torch.empty_like(routing_map) for _ in range(size)]
        dist.all_gather(every, routing_map)
        assert counts.tolist() == torch.cat(every)[:, local].sum(0).tolist()
        experts = torch.repeat_interleave(torch.tensor(local), counts).unsqueeze(1)
        y = (rows.float() * (1 + experts) * row_probs.unsqueeze(1)).to(rows.dtype)
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))
        factors = (probs.detach() * (1 + torch.arange(EXPERTS))).sum(1).view(tokens, 1, 1)
        assert torch.allclose(out.float(), x.detach().float() * factors, rtol=2**-5, atol=2**-5)
        grad = torch.randn_like(out)
        out.backward(grad)
        assert torch.allclose(x.grad.float(), grad.float() * factors, rtol=2**-5, atol=2**-3)
        both = (grad.float() * x.detach().float()).sum(-1)
        assert torch.allclose(probs.grad, routing_map * both * (1 + torch.arange(EXPERTS)), rtol=2**-4, atol=1.0)
    sys.stdout.write("passed\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
