"""Selection of experts from scores, other than a plain top-k."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def within_best_groups(scores: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """Return scores [..., E] with -inf outside each token's `topk_groups` best of `num_groups` contiguous groups.

    A group is ranked by the sum of its two highest scores (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2, where two is
    K over topk_groups). Scores may have any sign; a group has at least two experts.
    """
    grouped = scores.unflatten(-1, (num_groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_groups, dim=-1).indices
    allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)


def choose_by_experts(scores: Tensor, num_topk: int, experts_per_token: float, real: Tensor | None = None) -> Tensor:
    """Let every expert take the tokens that score it highest (Zhou et al. 2022, Expert Choice Routing, section 3.2).

    A token taken by more than num_topk experts keeps the highest-scoring ones. Sorts are stable: the lower index wins.

    Args:
        scores: [T, E].
        num_topk: K, maximum number of experts of a token.
        experts_per_token: the paper's capacity factor; each expert takes ceil(T * experts_per_token / E) tokens.
        real: bool [T], tokens that can be taken; T in that formula is then their count. Default: all.

    Returns:
        int64 [T, K], highest score first, then -1.
    """
    num_tokens, num_experts = scores.shape
    if real is None:
        each: int | Tensor = math.ceil(num_tokens * experts_per_token / num_experts)
    else:  # the same arithmetic on the device
        each = (real.sum().to(torch.float64) * experts_per_token / num_experts).ceil()
        scores = scores.masked_fill(~real.unsqueeze(-1), -math.inf)
    order = scores.sort(dim=0, descending=True, stable=True).indices
    first = torch.arange(num_tokens, device=scores.device).unsqueeze(-1) < each
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(0, order, first.expand_as(order))
    by_token = scores.masked_fill(~taken, -math.inf).sort(dim=1, descending=True, stable=True)
    values, idx = by_token.values[:, :num_topk], by_token.indices[:, :num_topk]
    return idx.masked_fill(values == -math.inf, -1)
