"""Sums over a batch's sequences by one binary tree, so that their bits do not depend on how ranks share the sequences.

Halves of the sequences are summed separately, down to an odd number of them, which is summed in order. Each of 2, 4,
8, ... ranks that hold equal contiguous parts has a whole subtree; `tree_all_reduce` adds up the ranks by the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

# torch 2.13 renames it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def tree_sum(parts: Tensor) -> Tensor:
    """Return parts [n, ...] summed over their first dimension, by the tree; zeros if n is 0."""
    num_parts = len(parts)
    if num_parts == 0:
        return parts.sum(0)
    each, *rest = parts.unflatten(0, (num_parts & -num_parts, -1)).unbind(1)
    for part in rest:
        each = each + part
    while len(each) > 1:
        each = each[0::2] + each[1::2]
    return each[0]


def tree_all_reduce(t: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace t by its sum over the ranks of the group, by the tree. Collective; it moves what an all-reduce moves.

    Args:
        t: contiguous; equal shape and dtype on every rank.
        group: default: the default process group.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return
    flat = t.view(-1)
    mine = F.pad(flat, (0, -len(flat) % num_ranks))  # each rank sums a part of equal size
    of_ranks = torch.empty_like(mine)
    dist.all_to_all_single(of_ranks, mine, group=group)
    _all_gather(mine, tree_sum(of_ranks.view(num_ranks, -1)), group=group)
    flat.copy_(mine[: len(flat)])


class _ForEachSequence(torch.autograd.Function):
    """Copies a weight for each sequence, without memory; its backward sums the copies' gradients by the tree."""

    @staticmethod
    def forward(weight: Tensor, num_sequences: int, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype).expand(num_sequences, *weight.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, ctx.num_sequences, ctx.dtype = inputs
        ctx.weight_dtype = weight.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wider = torch.promote_types(grad.dtype, ctx.weight_dtype)
        return tree_sum(grad.to(wider)).to(ctx.weight_dtype), None, None


class _WithTangents(_ForEachSequence):
    """_ForEachSequence in forward mode also, which torch.compile does not trace."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.to(ctx.dtype).expand(ctx.num_sequences, *tangent.shape)


def for_each_sequence(weight: Tensor, num_sequences: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight [...] as [num_sequences, ...], for products whose gradients `tree_sum` then adds up.

    A weight that is used several times in a batch must be copied once, so that each sequence's gradients are added
    first. During the backward one gradient of each sequence is in memory.

    Args:
        dtype: cast the weight to this dtype; gradients are summed in the wider of this and its own.
    """
    function = _ForEachSequence if is_compiling() else _WithTangents
    copies: Tensor = function.apply(weight, num_sequences, dtype or weight.dtype)
    return copies
