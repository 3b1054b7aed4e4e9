"""torchtitan's DeepEP dispatcher as a CUDA program: experts in training and in inference, their sums and gradients."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torchtitan.distributed.deepep import deepep

HIDDEN, EXPERTS, TOPK, TOKENS, MOST = 64, 8, 3, 12, 32


def experts(rows: torch.Tensor, counts: torch.Tensor, first: int) -> torch.Tensor:
    """Multiply the rows of expert e by 1 + e; rows past the counts are those of a worst case."""
    factors = torch.repeat_interleave(1 + first + torch.arange(len(counts)), counts)
    return torch.cat([rows[: len(factors)] * factors.unsqueeze(1).to(rows.dtype), rows[len(factors) :]])


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    deepep.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=MOST, num_topk=TOPK)
    local = EXPERTS // size
    torch.manual_seed(rank)
    for tokens in (TOKENS, MOST):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16().requires_grad_()
        scores, ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOPK)
        scores.requires_grad_()

        def layer(cudagraphable, x=x, ids=ids, scores=scores, tokens=tokens):
            rows, counts, state = deepep.dispatch_tokens(
                x, ids, scores, local, EXPERTS, num_tokens_per_rank=tokens, cudagraphable=cudagraphable
            )
            out = deepep.combine_tokens(experts(rows, counts, rank * local), state)
            deepep.sync_combine()
            return out, counts

        out, counts = layer(False)
        every = [torch.empty_like(ids) for _ in range(size)]
        dist.all_gather(every, ids)
        assert counts.tolist() == [int((torch.cat(every) == rank * local + e).sum()) for e in range(local)]
        factors = (scores.detach() * (1 + ids)).sum(1, keepdim=True)
        assert torch.allclose(out.float(), x.detach().float() * factors, rtol=2**-5, atol=2**-4)
        with torch.no_grad():
            inference, its_counts = layer(True)
        assert torch.equal(its_counts, counts)
        assert torch.allclose(inference.float(), out.float(), rtol=2**-5, atol=2**-4)
        grad = torch.randn_like(out)
        out.backward(grad)
        assert torch.allclose(x.grad.float(), grad.float() * factors, rtol=2**-5, atol=2**-4)
        both = (grad.float() * x.detach().float()).sum(1, keepdim=True) * (1 + ids)
        assert torch.allclose(scores.grad, both, rtol=2**-4, atol=1.0)
    sys.stdout.write("passed\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
