"""Counts of a routing, as DeepEP's get_dispatch_layout returns them, and what is wrong with a routing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_rt.compat.deep_ep.config import NVL_PEERS


class Layout(NamedTuple):
    """Counts of one routing [T, K] over E experts.

    Attributes:
        per_rank: int32 [R], tokens that visit each rank.
        per_expert: int32 [E], entries that name each expert.
        in_rank: bool [T, R], True if the token visits the rank.
    """

    per_rank: Tensor
    per_expert: Tensor
    in_rank: Tensor


def layout_of(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count a routing. An id outside [0, num_experts) names no expert."""
    known = topk_idx.where((topk_idx >= 0) & (topk_idx < num_experts), -1)
    per_expert = torch.bincount(known.flatten() + 1, minlength=num_experts + 1)[1:].int()
    ranks = known.div(num_experts // num_ranks, rounding_mode="floor")  # -1 stays -1
    visited = ranks.new_zeros(len(ranks), num_ranks + 1, dtype=torch.bool).scatter_(1, ranks + 1, True)
    in_rank = visited[:, 1:].contiguous()
    return Layout(in_rank.sum(0, dtype=torch.int32), per_expert, in_rank)


def per_domain(in_rank: Tensor) -> Tensor | None:
    """Return int32 [R / 8], tokens that visit each domain of 8 ranks, as DeepEP groups them; None for one domain."""
    num_tokens, num_ranks = in_rank.shape
    if num_ranks <= NVL_PEERS or num_ranks % NVL_PEERS:
        return None
    return in_rank.view(num_tokens, num_ranks // NVL_PEERS, NVL_PEERS).any(2).sum(0, dtype=torch.int32)


def repeats(topk_idx: Tensor) -> bool:
    """True if a token names an expert twice."""
    ids = topk_idx.sort(1).values
    return bool(((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any())


class KnownLayouts:
    """The last layout that this rank computed, so that a dispatch with its tensors need not check them again."""

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()

    def remember(self, topk_idx: Tensor, layout: Layout) -> None:
        """Remember that the layout was computed from this routing, as both are now, unless a token repeats an expert.

        A GPU's routing is not searched for repetitions, since the host would have to wait for it.
        """
        self._tensors = ()
        if any(t.is_inference() for t in (topk_idx, *layout)):  # these count no versions
            return
        if topk_idx.device.type == "cpu" and repeats(topk_idx):
            return
        self._tensors = (topk_idx, *layout)
        self._versions = tuple([t._version for t in self._tensors])

    def knows(self, topk_idx: Tensor, layout: Layout) -> bool:
        """True if the layout is the remembered one of this routing, and nothing was written to either since."""
        given = (topk_idx, *layout)
        if not self._tensors or any(a is not b for a, b in zip(given, self._tensors, strict=True)):
            return False
        return tuple([t._version for t in given]) == self._versions
