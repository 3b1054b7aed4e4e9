"""What keeps experts busy: counts, the load-balancing loss, the z-loss."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

BalanceScope = Literal["sequence", "batch"]


class RouterAux(NamedTuple):
    """What a routing decision costs and how it spread. Padding is in none of it.

    Attributes:
        loss: weighted sum of the two losses, to be added to the training loss.
        load_balancing_loss: E * sum_e f_e P_e, one when balanced, over each sequence or the batch.
        z_loss: mean squared log-sum-exp of the logits (Zoph et al. 2022, ST-MoE, eq. 5).
        tokens_per_expert: int64 [E], top-k entries of this rank's tokens; not differentiable.
        mean_prob: [E], P_e over this rank's tokens; differentiable.
        topk_idx: int64 [T, K], what the router chose, for `forward(..., topk_idx=...)` to repeat; -1 for no expert, and
            with expert_choice -2 throughout for a token that no expert took, since a row of -1 is padding.
    """

    loss: Tensor
    load_balancing_loss: Tensor
    z_loss: Tensor
    tokens_per_expert: Tensor
    mean_prob: Tensor | None = None
    topk_idx: Tensor | None = None


def load_balancing_loss(mean_prob: Tensor, tokens_per_expert: Tensor, num_means: int | Tensor | None = None) -> Tensor:
    """E * sum_e f_e P_e (Fedus et al. 2021, Switch Transformers, eq. 4), a mean over all dimensions but the last.

    Counts summed over ranks or micro-batches make it the loss of the global batch (Qiu et al. 2025, Demons in the
    Detail): it is linear in P_e, so a mean over ranks of this rank's loss is that of all ranks.

    Args:
        mean_prob: [..., E], mean probability of each expert.
        tokens_per_expert: [..., E], entries of each expert, of which f_e is the share. No gradient.
        num_means: how many [E] of mean_prob hold tokens, where some are of padding alone and so zero; default: all.
    """
    total = tokens_per_expert.sum(-1, keepdim=True).clamp(min=1)
    fraction = tokens_per_expert.to(mean_prob.dtype) / total.to(mean_prob.dtype)
    num_experts = mean_prob.shape[-1]
    over = mean_prob.numel() // num_experts if num_means is None else num_means
    return num_experts * (fraction * mean_prob).sum() / at_least_one(over)


def z_loss(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """logits [..., E] -> the mean over `real` tokens of logsumexp^2 (Zoph et al. 2022, ST-MoE, eq. 5)."""
    squares = logits.logsumexp(-1).square()
    if real is None:
        return squares.sum() / at_least_one(squares.numel())
    return squares.masked_fill(~real, 0).sum() / at_least_one(real.sum())


def at_least_one(count: int | Tensor) -> int | Tensor:
    """A count to divide by: a batch without tokens costs nothing instead of 0 / 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)


def count_tokens(idx: Tensor, num_experts: int, may_lack: bool = True) -> Tensor:
    """idx int64 [..., N] -> int64 [..., E], entries that name each expert; others count for none."""
    ones = torch.ones_like(idx)
    if may_lack:
        ones = ((idx >= 0) & (idx < num_experts)).to(torch.int64)
        idx = idx.clamp(0, num_experts - 1)
    counts = torch.zeros(*idx.shape[:-1], num_experts, dtype=torch.int64, device=idx.device)
    return counts.scatter_add_(-1, idx, ones)


def sequence_view(t: Tensor, scope: BalanceScope) -> Tensor:
    """[..., S, N] -> [sequences, S, N]; one sequence where the scope is the batch, or where there is no [..., S]."""
    return t.flatten(0, -2).unsqueeze(0) if scope == "batch" or t.dim() == 2 else t.flatten(0, -3)


def count_sequences(
    sequences: Tensor, real: Tensor | None, scope: BalanceScope
) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """How many of the [sequences, S, N] hold a token, how many tokens each has, and all have; on the device if any of
    them may be padding, of which `real` [..., S] is False.
    """
    if real is None:
        number, length = sequences.shape[:2]
        return number, length, number * length
    lengths = sequence_view(real.unsqueeze(-1), scope).sum(1)
    return (lengths > 0).sum(), lengths, lengths.sum()
