"""The trainer's oracle: a mixture of experts as a dense loop in plain torch, without moe_rt's buffers and ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.nn.router import RouterAux
from moe_rt.train import TrainConfig


class DenseMoE(nn.Module):
    """Every expert processes every token; experts that the router did not choose have weight zero."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.num_topk, self.coefs = config.num_topk, (config.aux_loss_coef, config.z_loss_coef)
        num_experts, hidden, intermediate = config.num_experts, config.hidden, config.intermediate
        self.router = nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        with torch.no_grad():  # each expert has a separate stream, as in MoELayer
            for expert, seed in enumerate(torch.randint(2**62, (num_experts,)).tolist()):
                generator = torch.Generator().manual_seed(seed)
                self.gate_up[expert].normal_(std=hidden**-0.5, generator=generator)
                self.down[expert].normal_(std=intermediate**-0.5, generator=generator)

    def forward(self, x: Tensor) -> tuple[Tensor, RouterAux]:
        num_experts = len(self.router)
        logits = x @ self.router.T
        probs = logits.softmax(-1)
        top, idx = probs.topk(self.num_topk, dim=-1)
        chosen = F.one_hot(idx, num_experts)  # [B, S, K, E]
        weights = (chosen * (top / top.sum(-1, keepdim=True)).unsqueeze(-1)).sum(2)
        out = torch.zeros_like(x)
        for expert in range(num_experts):
            gate, up = (x @ self.gate_up[expert].T).chunk(2, dim=-1)
            out = out + weights[..., expert, None] * ((F.silu(gate) * up) @ self.down[expert].T)

        fraction = chosen.sum(2).float().mean(1) / self.num_topk  # [B, E]
        balance = num_experts * (fraction * probs.mean(1)).sum(-1).mean()
        z = logits.logsumexp(-1).square().mean()
        loss = self.coefs[0] * balance + self.coefs[1] * z
        return out, RouterAux(loss, balance, z, chosen.sum((0, 1, 2)))
