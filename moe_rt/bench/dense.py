"""Weights of the layer op, and a reference of the layer in fp32 without any exchange."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.bench.cases import Case
from moe_rt.bench.inputs import generator
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.router import Router


def make_router(case: Case) -> Router:
    router = Router(case.hidden, case.experts, case.topk)
    nn.init.normal_(router.weight, std=case.hidden**-0.5, generator=generator("router"))
    return router


def make_experts(case: Case, ids: range, dtype: torch.dtype) -> SwiGLUExperts:
    """Create experts by global id. Their parameters have the payload dtype, since casting is no part of an exchange."""
    experts = SwiGLUExperts(len(ids), case.hidden, case.intermediate, dtype=dtype)
    for local, expert in enumerate(ids):
        g = generator("expert", expert)
        for weight in (experts.gate_up_proj, experts.down_proj):
            rows, columns = weight.shape[1:]
            weight.data[local] = torch.randn(rows, columns, generator=g).mul_(columns**-0.5).to(case.torch_dtype)
    return experts


def make_grad_out(case: Case, rank: int) -> Tensor:
    """Gradient of a rank's output."""
    return torch.randn(case.tokens, case.hidden, generator=generator("grad", rank)).to(case.torch_dtype)


@torch.enable_grad()
def dense(case: Case, x: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """Return out, grad_x and router.grad: every expert of the group in turn on its tokens."""
    x = x.float().requires_grad_()
    router = make_router(case)
    topk_idx, topk_weights, _ = router(x)
    grad_x, grad_weights = torch.zeros_like(x), torch.zeros_like(topk_weights)
    out = torch.zeros_like(x)
    for expert in range(case.experts):  # each has its own backward, so that only one is in memory
        token, k = (topk_idx == expert).nonzero(as_tuple=True)
        weights = make_experts(case, range(expert, expert + 1), torch.float32)
        rows = x.detach()[token].requires_grad_()
        weight = topk_weights.detach()[token, k].requires_grad_()
        gate, up = F.linear(rows, weights.gate_up_proj[0].detach()).chunk(2, dim=1)
        y = weight[:, None] * F.linear(F.silu(gate) * up, weights.down_proj[0].detach())
        grad_rows, grad_weight = torch.autograd.grad(y, (rows, weight), grad_out.float()[token])
        out.index_add_(0, token, y.detach())
        grad_x.index_add_(0, token, grad_rows)
        grad_weights[token, k] = grad_weight
    through_router, grad_router = torch.autograd.grad(topk_weights, (x, router.weight), grad_weights)
    return {"out": out, "grad_x": grad_x + through_router, "router.grad": grad_router}
