"""The router: which experts a token visits, with what weight, and the losses that keep experts busy."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ScoreFunc = Literal["softmax", "sigmoid"]


class RouterAux(NamedTuple):
    """What a routing decision costs and how it spread.

    Attributes:
        loss: weighted sum of the two losses, to be added to the training loss.
        load_balancing_loss: E * sum_e f_e P_e, one when balanced (Fedus et al. 2021, Switch Transformers, eq. 4).
        z_loss: mean squared log-sum-exp of the logits (Zoph et al. 2022, ST-MoE, eq. 5).
        tokens_per_expert: int64 [E], top-k entries of this rank's tokens; not differentiable.
    """

    loss: Tensor
    load_balancing_loss: Tensor
    z_loss: Tensor
    tokens_per_expert: Tensor


class Router(nn.Module):
    """Linear gate in fp32, scores, top-k.

    softmax: probabilities over all experts, then top-k. sigmoid: independent scores, then top-k. With `norm_topk` the
    chosen scores are divided by their sum; `route_scale` multiplies them last.

    The load-balancing loss is taken per sequence and averaged (DeepSeek-V3's form), so that it does not depend on how
    sequences are spread over ranks. An input [T, H] counts as one sequence.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        score_func: ScoreFunc = "softmax",
        norm_topk: bool = True,
        route_scale: float = 1.0,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        self.num_topk, self.score_func, self.norm_topk, self.route_scale = num_topk, score_func, norm_topk, route_scale
        self.aux_loss_coef, self.z_loss_coef = aux_loss_coef, z_loss_coef

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, RouterAux]:
        """x [..., H] -> topk_idx int64 [T, K], topk_weights fp32 [T, K] (fp64 for fp64), and the losses."""
        acc = torch.float64 if x.dtype is torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(acc), self.weight.to(acc))
            scores = logits.softmax(-1) if self.score_func == "softmax" else logits.sigmoid()
            weights, idx = scores.topk(self.num_topk, dim=-1)
            if self.norm_topk:
                weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(acc).tiny)
            weights = weights * self.route_scale
            aux = self._aux(logits, scores, idx)
        return idx.reshape(-1, self.num_topk), weights.reshape(-1, self.num_topk), aux

    def _aux(self, logits: Tensor, scores: Tensor, idx: Tensor) -> RouterAux:
        num_experts = self.weight.shape[0]
        probs = scores if self.score_func == "softmax" else scores / scores.sum(-1, keepdim=True)
        counts = torch.zeros_like(probs, dtype=torch.int64).scatter_add_(-1, idx, torch.ones_like(idx))
        # [sequences, S, E]; an empty batch costs nothing instead of 0 / 0.
        per_sequence = (1, -1, num_experts) if probs.dim() == 2 else (-1, probs.shape[-2], num_experts)
        length = max(1, probs.shape[-2])
        fraction = counts.view(per_sequence).sum(1).to(probs.dtype) / (length * self.num_topk)
        mean_prob = probs.reshape(per_sequence).sum(1) / length
        num_sequences = max(1, fraction.shape[0])
        balance = num_experts * (fraction * mean_prob).sum() / num_sequences
        z = logits.logsumexp(-1).square().sum() / max(1, logits.numel() // num_experts)
        loss = self.aux_loss_coef * balance + self.z_loss_coef * z
        return RouterAux(loss, balance, z, counts.view(-1, num_experts).sum(0))
