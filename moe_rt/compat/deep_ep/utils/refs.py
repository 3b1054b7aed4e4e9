"""Dispatch and combine in plain torch over torch.distributed, as DeepEP's tests use them to compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rt.compat.deep_ep.utils.envs import get_global_seed

_FACTOR = 131071


def dispatch(
    x: Any, topk_idx: Tensor, topk_weights: Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
    """Return received rows, local ids, weights, global source tokens, and int32 [R], the number from each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    per_rank = num_experts // size
    parts = x if isinstance(x, tuple) else (x,)
    lists = [(topk_idx // per_rank == peer).any(1).nonzero().flatten() for peer in range(size)]  # -1 stays -1
    sent = torch.tensor([len(tokens) for tokens in lists], dtype=torch.int32)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    tokens = torch.cat(lists)

    def exchanged(t: Tensor) -> Tensor:
        bits = t[tokens].view(torch.uint8) if t.itemsize == 1 else t[tokens]  # no back end sends fp8
        out = bits.new_empty(int(came.sum()), *bits.shape[1:])
        dist.all_to_all_single(out, bits, came.tolist(), sent.tolist())
        return out.view(t.dtype)

    rows = tuple(exchanged(part) for part in parts)
    ids = exchanged(topk_idx) - rank * per_rank
    ids = ids.masked_fill((ids < 0) | (ids >= per_rank), -1)
    every = torch.arange(len(topk_idx), dtype=torch.int32, device=topk_idx.device) + rank * num_max_tokens_per_rank
    return rows if len(rows) > 1 else rows[0], ids, exchanged(topk_weights), exchanged(every), came


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """Return bfloat16 [T, K, H], which each rank can compute for a token from its global number."""
    device = src_token_global_idx.device
    number = src_token_global_idx.unsqueeze(1) * num_topk + torch.arange(num_topk, device=device)
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    frequency = ((number * _FACTOR % most).float() + 1) / most
    columns = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    return torch.sin(frequency.unsqueeze(2) * columns + math.sin(float(get_global_seed()))).bfloat16()


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """Return [T, H]: data [T, K, H] added in the order of K in fp32 to the initial value, rounded once."""
    total = torch.zeros_like(data[:, 0] if initial_value is None else initial_value, dtype=torch.float32)
    total += 0 if initial_value is None else initial_value
    for part in data.unbind(1):
        total += part.float()
    return total.to(data.dtype)


def combine(
    y: Tensor, topk_idx: Tensor, num_scaleout_ranks: int, num_scaleup_ranks: int, num_experts: int, bias: Any,
    reduce_in_local: bool, reduce_in_scaleup: bool,
) -> Tensor:  # fmt: skip
    """Return [T, H]: y [T, K, H] added in the order of topk_idx, after sums in each rank, and in each domain."""
    per_rank = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _reduced(y, topk_idx // per_rank)
    if reduce_in_scaleup:
        y = _reduced(y, topk_idx // (per_rank * num_scaleup_ranks))
    first = None if bias is None else bias[0].float() + bias[1].float() if isinstance(bias, tuple) else bias.float()
    return ordered_accumulate(y, first)


def _reduced(y: Tensor, groups: Tensor) -> Tensor:
    """Return y with the rounded sum of each token's entries of a group at the group's last entry, and 0 elsewhere."""
    out = torch.zeros_like(y)
    num_topk = y.shape[1]
    for last in range(num_topk):
        same = groups == groups[:, last : last + 1]
        is_last = ~same[:, last + 1 :].any(1)
        out[:, last] = ordered_accumulate(y.masked_fill(~same.unsqueeze(2), 0)) * is_last.unsqueeze(1)
    return out
