"""A user's router, experts and shared expert, and functions that ranks run with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from layer.cases_layer import EXPERTS, HIDDEN, TOPK, config, inputs_for
from torch import Tensor, nn

from moe_rt import MoELayer
from moe_rt.nn.router import RouterAux
from moe_rt.nn.spread import SpreadModule
from moe_rt.ops.grouped import grouped_linear
from moe_rt.parallel import expert_parameters, prepare


class CosineRouter(nn.Module):
    """Scores are cosines between a token and an expert's vector; weights may be negative and do not sum to one."""

    def __init__(self, num_experts: int = EXPERTS, num_topk: int = TOPK) -> None:
        super().__init__()
        self.num_experts, self.num_topk = num_experts, num_topk
        self.vectors = nn.Parameter(torch.randn(num_experts, HIDDEN, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor, topk_idx: Tensor | None = None) -> tuple[Tensor, Tensor, RouterAux]:
        scores = F.normalize(x.reshape(-1, HIDDEN), dim=-1) @ F.normalize(self.vectors, dim=-1).T
        idx = scores.topk(self.num_topk).indices if topk_idx is None else topk_idx
        counts = F.one_hot(idx, self.num_experts).sum((0, 1))
        zero = scores.new_zeros(())
        return idx, scores.gather(1, idx), RouterAux(zero, zero, zero, counts)


class LinearExperts(SpreadModule):
    """One square matrix and a GELU for each expert of this rank; all experts together do not depend on the ranks."""

    def __init__(self, expert_ids: list[int]) -> None:
        super().__init__()
        whole = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(2))
        self.weight = nn.Parameter(whole[expert_ids] * HIDDEN**-0.5)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return F.gelu(grouped_linear(x, self.parts("weight")["weight"].to(x.dtype), offs))


def shared_expert() -> nn.Module:
    linear = nn.Linear(HIDDEN, HIDDEN, bias=False)
    linear.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    return linear


def own_layer(group: Any, **changes: Any) -> tuple[MoELayer, int, int]:
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    size = group.size if isinstance(group.size, int) else group.size()
    each, extra = divmod(EXPERTS, size)
    first = rank * each + min(rank, extra)
    layer = MoELayer(
        config(aux_loss_coef=0.0),
        group,
        **{
            "router": CosineRouter(),
            "experts": LinearExperts(list(range(first, first + each + (rank < extra)))),
            "shared_expert": shared_expert(),
            **changes,
        },
    )
    return layer, rank, size


def with_siblings(group: Any, num_tokens: list[int]) -> dict[str, Tensor]:
    """Return output and gradients of sum(out * fixed) on this rank, and the output of a replay."""
    layer, rank, _ = own_layer(group)
    x = inputs_for(rank, num_tokens[rank]).requires_grad_()
    layer.reset_parameters()  # leaves modules that were passed in unchanged
    out, aux = layer(x)
    (out * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    replayed, _ = layer(x, aux.tokens_per_expert.new_zeros(num_tokens[rank], TOPK))
    result = {
        "out": out.detach(),
        "x": x.grad,
        "load": aux.tokens_per_expert,
        **{name: p.grad for name, p in layer.named_parameters()},
        "replayed": replayed.detach(),
    }
    layer.buffer.close()
    return result


def dense(num_tokens: list[int]) -> dict[str, Any]:
    """Return outputs and gradients of all ranks' tokens from one loop over every token's experts."""
    router, experts = CosineRouter(), LinearExperts(list(range(EXPERTS)))
    shared = shared_expert()
    xs = [inputs_for(rank, n).requires_grad_() for rank, n in enumerate(num_tokens)]
    outs = []
    for x in xs:
        idx, weights, _ = router(x)
        out = shared(x)
        for expert, weight in enumerate(experts.weight):
            out = out + ((idx == expert) * weights).sum(-1, keepdim=True) * F.gelu(x @ weight.T)
        outs.append(out)
    torch.cat([out * torch.linspace(-1, 1, HIDDEN) for out in outs]).sum().backward()
    grads = {"router.vectors": router.vectors.grad, "shared_expert.weight": shared.weight.grad}
    return {"outs": outs, "xs": [x.grad for x in xs], "experts.weight": experts.weight.grad, **grads}


def made_ready(group: Any) -> tuple[bool, Tensor, Tensor]:
    """Return whether the user's experts count as experts, and their mean gradient, by hand and by `prepare`."""
    gradients = []
    for ready in (False, True):
        layer, rank, size = own_layer(group)
        found = [p is layer.experts.weight for p in expert_parameters(layer)] == [True]
        if ready:
            prepare(layer)
        layer(inputs_for(rank, 8))[0].sum().backward()
        gradients.append(layer.experts.weight.grad.clone() / (1 if ready else size))
        layer.buffer.close()
    return found, *gradients


def refused(group: Any, which: dict[str, Any], on: int) -> None:
    """Make a layer on whose rank `on` the module in `which` does not fit."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    own_layer(group, **(which if rank == on else {}))


class Nested(LinearExperts):
    def __init__(self) -> None:
        super().__init__([0, 1, 2, 3])
        self.gate = nn.Linear(HIDDEN, 1)
