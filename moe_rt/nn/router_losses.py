"""Statistics and losses of routing: counts, the load-balancing loss, the z-loss."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

BalanceScope = Literal["sequence", "batch"]


class RouterAux(NamedTuple):
    """Losses and statistics of one routing decision. Padding is excluded from all of them.

    Attributes:
        loss: scalar, weighted sum of the two losses, to be added to the training loss.
        load_balancing_loss: E * sum_e f_e P_e, 1 when balanced, per sequence or batch; see `balance_scope`.
        z_loss: mean squared log-sum-exp of the logits (Zoph et al. 2022, ST-MoE, eq. 5).
        tokens_per_expert: int64 [E], top-k entries of this rank's tokens; not differentiable.
        mean_prob: [E], P_e over this rank's tokens; differentiable.
        topk_idx: int64 [T, K], the router's choice, which `forward(..., topk_idx=...)` can repeat; -1 for no expert.
            With expert_choice the row of a token that no expert took is all -2, since a row of -1 is padding.
    """

    loss: Tensor
    load_balancing_loss: Tensor
    z_loss: Tensor
    tokens_per_expert: Tensor
    mean_prob: Tensor | None = None
    topk_idx: Tensor | None = None


def load_balancing_loss(mean_prob: Tensor, tokens_per_expert: Tensor, num_means: int | Tensor | None = None) -> Tensor:
    """Return E * sum_e f_e P_e (Fedus et al. 2021, Switch Transformers, eq. 4), averaged over the leading dimensions.

    With counts summed over ranks or micro-batches it is the loss of the global batch (Qiu et al. 2025, Demons in the
    Detail): the loss is linear in P_e, so the mean of all ranks' losses is the loss of all ranks.

    Args:
        mean_prob: [..., E], mean probability of each expert.
        tokens_per_expert: [..., E], entries that name each expert; f_e is expert e's share. Not differentiable.
        num_means: number of rows [E] of mean_prob with tokens; rows of only padding are zero. Default: all rows.

    Returns:
        A scalar.
    """
    total = tokens_per_expert.sum(-1, keepdim=True).clamp(min=1)
    fraction = tokens_per_expert.to(mean_prob.dtype) / total.to(mean_prob.dtype)
    num_experts = mean_prob.shape[-1]
    over = mean_prob.numel() // num_experts if num_means is None else num_means
    return num_experts * (fraction * mean_prob).sum() / at_least_one(over)


def z_loss(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean over `real` tokens of logsumexp(logits [..., E])^2 (Zoph et al. 2022, ST-MoE, eq. 5)."""
    squares = logits.logsumexp(-1).square()
    if real is None:
        return squares.sum() / at_least_one(squares.numel())
    return squares.masked_fill(~real, 0).sum() / at_least_one(real.sum())


def at_least_one(count: int | Tensor) -> int | Tensor:
    """Return the count, but at least 1, so that a batch without tokens has loss 0 instead of 0 / 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)


def count_tokens(idx: Tensor, num_experts: int, may_lack: bool = True) -> Tensor:
    """Count the entries of idx int64 [..., N] that name each expert -> int64 [..., E]; other ids are ignored."""
    ones = torch.ones_like(idx)
    if may_lack:
        ones = ((idx >= 0) & (idx < num_experts)).to(torch.int64)
        idx = idx.clamp(0, num_experts - 1)
    counts = torch.zeros(*idx.shape[:-1], num_experts, dtype=torch.int64, device=idx.device)
    return counts.scatter_add_(-1, idx, ones)


def sequence_view(t: Tensor, scope: BalanceScope) -> Tensor:
    """Reshape [..., S, N] to [sequences, S, N]; to one sequence if the scope is the batch or t is [S, N]."""
    return t.flatten(0, -2).unsqueeze(0) if scope == "batch" or t.dim() == 2 else t.flatten(0, -3)


def count_sequences(
    sequences: Tensor, real: Tensor | None, scope: BalanceScope
) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """Return the number of [sequences, S, N] with a token, the tokens of each, and all tokens.

    The counts are tensors on the device if `real` [..., S], False for padding, is given.
    """
    if real is None:
        number, length = sequences.shape[:2]
        return number, length, number * length
    lengths = sequence_view(real.unsqueeze(-1), scope).sum(1)
    return (lengths > 0).sum(), lengths, lengths.sum()
