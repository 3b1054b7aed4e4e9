"""Scores of experts whose first rank gets more tokens than the others, as DeepEP's tests use them."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 20
_CHOSEN = 0.9  # chosen experts score more, the others less


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """Return float32 [T, E], whose top K send `ratio` times more tokens to rank 0 than to another rank on average.

    Args:
        precise: choose the experts so that the ratio is exact up to rounding, and that other ranks get the same.
    """
    if precise:
        return _precise(num_tokens, num_experts, num_ranks, num_topk, ratio)
    low = 1.0
    high = 100.0
    for _ in range(_ROUNDS if ratio != 1.0 else 0):
        factor = (low + high) / 2
        ranks = _scaled(num_tokens, num_experts, num_ranks, factor).topk(num_topk).indices // (num_experts // num_ranks)
        counts = torch.stack([(ranks == rank).any(1).sum() for rank in range(num_ranks)]).float()
        if counts[0] > counts[1:].mean() * ratio:
            high = factor
        else:
            low = factor
    return _scaled(num_tokens, num_experts, num_ranks, low)


def _scaled(num_tokens: int, num_experts: int, num_ranks: int, factor: float) -> Tensor:
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    scores[:, : num_experts // num_ranks] *= factor
    return scores


def _precise(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> Tensor:
    per_rank = num_experts // num_ranks
    fewest = -(-num_topk // per_rank)  # ranks that have K experts
    visits = min(num_topk, num_ranks, max(int((num_ranks - 1) / ratio) + 1, fewest))  # ranks of each token
    special = min(num_tokens, round(num_tokens * visits * ratio / (num_ranks - 1 + ratio)))
    if visits == num_ranks:
        special = num_tokens
    ranks = torch.zeros(num_tokens, visits, dtype=torch.int64)
    others = torch.full((num_tokens,), visits).index_fill_(0, torch.arange(special), visits - 1)
    turns = (others.cumsum(0) - others).unsqueeze(1) + torch.arange(visits)  # the other ranks take turns
    ranks[:] = 1 + turns % (num_ranks - 1)
    ranks[:special, visits - 1] = 0
    ranks = ranks[torch.randperm(num_tokens)]
    extra, numbers = num_topk - visits, []
    for _ in range(visits):
        numbers.append(1 + min(per_rank - 1, extra))
        extra -= numbers[-1] - 1
    places = torch.rand(num_tokens, visits, per_rank).argsort(2)
    wanted = torch.arange(per_rank) < torch.tensor(numbers).unsqueeze(1)  # [visits, per_rank]
    experts = (ranks.unsqueeze(2) * per_rank + places)[wanted.expand(num_tokens, -1, -1)].view(num_tokens, num_topk)
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32) * _CHOSEN
    above = 1 - (1 - _CHOSEN) * torch.rand(num_tokens, num_topk, dtype=torch.float32)
    return scores.scatter_(1, experts, above)
