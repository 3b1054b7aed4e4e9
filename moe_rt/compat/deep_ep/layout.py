"""Counts of a routing, as DeepEP's get_dispatch_layout returns them, and what is wrong with a routing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import PLAN_HEAD, PLAN_PULLED, Handle
from moe_rt.compat.deep_ep.config import NVL_PEERS

_LOW_HALF = 0xFFFF  # of a word of the plan that holds source rank and slot


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


class KnownLayout:
    """The last layout that this rank computed, so that a dispatch with its tensors need not check them."""

    _tensors: tuple[Tensor, ...] = ()
    _versions: list[int]

    def compute(self, topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
        """Return the layout, and remember both as they are now, unless a token names an expert twice.

        A GPU's routing is not searched for repetitions, since the host would have to wait for it.
        """
        layout = layout_of(topk_idx, num_experts, num_ranks)
        tensors = (topk_idx, *layout)
        known = not topk_idx.is_cpu or (topk_idx.is_contiguous() and not repeats(topk_idx))
        known = known and not any(t.is_inference() for t in tensors)  # these count no versions
        self._tensors = tensors if known else ()
        self._versions = [t._version for t in self._tensors]
        return layout

    def knows(self, topk_idx: Tensor | None, layout: Layout) -> bool:
        """True if these are the remembered tensors, and nothing was written to them since."""
        if not self._tensors or topk_idx is not self._tensors[0]:
            return False
        _, per_rank, per_expert, in_rank = self._tensors
        same = layout.per_rank is per_rank and layout.per_expert is per_expert and layout.in_rank is in_rank
        return same and self._versions == [t._version for t in self._tensors]


def layout_of(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count a routing. An id outside [0, num_experts) names no expert."""
    if not topk_idx.is_cpu:
        return counted_by_torch(topk_idx, num_experts, num_ranks)
    ids = topk_idx.contiguous()
    per_rank = ids.new_empty(num_ranks, dtype=torch.int32)
    layout = Layout(
        per_rank, per_rank.new_empty(num_experts), per_rank.new_empty(len(ids), num_ranks, dtype=torch.bool)
    )
    _engine.count_routing(*_addresses(ids, layout))
    return layout


def differs(topk_idx: Tensor, layout: Layout) -> bool:
    """True if the counts are not those of the routing, contiguous int64 [T, K], or a token names an expert twice.

    The host reads both.
    """
    if topk_idx.is_cpu:
        return _engine.counts_differ(*_addresses(topk_idx, layout))
    own = counted_by_torch(topk_idx, len(layout.per_expert), len(layout.per_rank))
    return not all(map(torch.equal, own, layout)) or repeats(topk_idx)


def _addresses(ids: Tensor, layout: Layout) -> tuple[int, ...]:
    sizes = (*ids.shape, len(layout.per_expert), len(layout.per_rank))
    per_rank, per_expert, in_rank = layout
    return ids.data_ptr(), *sizes, per_rank.data_ptr(), per_expert.data_ptr(), in_rank.data_ptr()


def counted_by_torch(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count a routing on any device."""
    known = topk_idx.where((topk_idx >= 0) & (topk_idx < num_experts), -1)
    per_expert = torch.bincount(known.flatten() + 1, minlength=num_experts + 1)[1:].int()
    ranks = known // (num_experts // num_ranks)  # -1 stays -1
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
    """True if a token of a contiguous routing names an expert twice. The host reads it."""
    if topk_idx.is_cpu:
        return _engine.names_twice(topk_idx.data_ptr(), *topk_idx.shape)
    ids = topk_idx.sort(1).values
    return bool(((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any())


def copied_ids(topk_idx: Tensor) -> bytes | Tensor | None:
    """Return a copy of a contiguous routing for `ids_equal`, None if a token names an expert twice.

    A GPU's routing is not searched, since the host would have to wait for it.
    """
    if topk_idx.is_cpu:
        return _engine.copy_ids(topk_idx.data_ptr(), *topk_idx.shape)
    return topk_idx.clone()


def ids_equal(copy: bytes | Tensor, topk_idx: Tensor) -> bool:
    """True if a contiguous routing of as many tokens and entries is the copied one."""
    if isinstance(copy, bytes):
        return topk_idx.is_cpu and _engine.ids_equal(copy, topk_idx.data_ptr())
    return topk_idx.device == copy.device and torch.equal(copy, topk_idx)


def names_others(copy: bytes | Tensor, topk_idx: Tensor) -> bool:
    """True if a routing of the same shape names an expert where the copied one names another one, or none."""
    sent = torch.frombuffer(bytearray(copy), dtype=torch.int64) if isinstance(copy, bytes) else copy
    return not ((topk_idx == sent.view(topk_idx.shape)) | (topk_idx == -1)).all()


def local_ids(
    plan: Tensor, begin: int, num_rows: int, num_topk: int, num_local: int, alignment: int
) -> tuple[Tensor, list[int]]:
    """Return local expert ids int64 [N, K], and each expert's number of entries, rounded up.

    The host reads the ids.

    Args:
        plan: int32, with the ids from index `begin` on.
    """
    if not plan.is_cpu:
        return local_ids_by_torch(plan, begin, num_rows, num_topk, num_local, alignment)
    ids = plan.new_empty(num_rows, num_topk, dtype=torch.int64)
    given = plan.data_ptr() + begin * plan.itemsize, num_rows * num_topk, num_local, alignment
    return ids, _engine.widen_ids(*given, ids.data_ptr())


def local_ids_by_torch(
    plan: Tensor, begin: int, num_rows: int, num_topk: int, num_local: int, alignment: int
) -> tuple[Tensor, list[int]]:
    """Return the same as `local_ids`, on any device."""
    ids = plan[begin : begin + num_rows * num_topk].view(num_rows, num_topk).long()
    counts = torch.bincount((ids + 1).flatten(), minlength=num_local + 1).tolist()[1:]
    return ids, [-(-count // alignment) * alignment for count in counts]


def source_tokens(handle: Handle, num_rows: int) -> Tensor:
    """Return int32 [num_rows]: the source's token of each row of a dispatch with layout="tokens"."""
    return handle.recv_plan[PLAN_HEAD : PLAN_HEAD + PLAN_PULLED * num_rows].view(num_rows, PLAN_PULLED)[:, 0]


def describe_rows(buffer: Buffer, handle: Handle, tokens: Tensor, ranges: Tensor) -> None:
    """Write the source's token of each row [L, rows], and begin << 32 | count of the rows of each source [L, R].

    Args:
        handle: of a complete dispatch to as many rows for each expert (buffer/packed.py). The host waits for no GPU.
    """
    if tokens.is_cpu:
        (num_local, slots), written = tokens.shape, (tokens.data_ptr(), ranges.data_ptr())
        _engine.describe_rows(handle.recv_plan.data_ptr(), buffer._engine.shape, num_local, slots, *written)
    else:
        described_by_torch(buffer, handle, tokens, ranges)


def put_in_columns(buffer: Buffer, handle: Handle, scales: Tensor, columns: Tensor) -> None:
    """Copy the scales of received rows [L * rows, S] to `columns` [L, rows, S], contiguous along dimension 1."""
    num_local, slots, words = columns.shape
    if columns.is_cpu:
        given = handle.recv_plan.data_ptr(), buffer._engine.shape, num_local, slots
        _engine.put_in_columns(*given, scales.data_ptr(), columns.data_ptr(), words)
    else:
        columns.copy_(scales.view(columns.shape))


def described_by_torch(buffer: Buffer, handle: Handle, tokens: Tensor, ranges: Tensor) -> None:
    """Do the same as `describe_rows`, on any device."""
    most_pulled = buffer.num_ranks * buffer.spec.num_max_tokens_per_rank
    most_copies = most_pulled * min(buffer.spec.num_topk, len(tokens))
    num_rows, rows_at = tokens.numel(), PLAN_HEAD + PLAN_PULLED * most_pulled
    head, copies = handle.recv_plan[:PLAN_HEAD], torch.arange(most_copies, device=tokens.device)
    pulled = handle.recv_plan[PLAN_HEAD:rows_at].view(most_pulled, PLAN_PULLED)
    real = torch.arange(most_pulled, device=tokens.device) < head[_engine.RecvPlan.num_pulled]
    first = pulled[:, 2].where(real, most_copies)
    token, source, *_ = pulled[torch.searchsorted(first, copies, right=True).sub(1).clamp(min=0)].unbind(1)
    rows = handle.recv_plan[rows_at : rows_at + most_copies]
    rows = rows.where((copies < head[_engine.RecvPlan.num_copies]) & (rows >= 0), num_rows).long()
    tokens.copy_(tokens.new_zeros(num_rows + 1).scatter_(0, rows, token)[:-1].view_as(tokens))
    blocks = rows // tokens.shape[1] * ranges.shape[1] + (source & _LOW_HALF)
    counts = ranges.new_zeros(ranges.numel() + ranges.shape[1]).scatter_add_(0, blocks, torch.ones_like(blocks))
    counts = counts[: ranges.numel()].view_as(ranges)
    ranges.copy_((counts.cumsum(1) - counts) << 32 | counts)
