"""The handle of an ElasticBuffer's dispatch: counts, sources of rows, and slots of the expanded layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_rt.compat.deep_ep.exchange import Received

SCALES_PER_16_BYTES = 4  # columns of scales begin at multiples of 16 bytes, for the next matrix multiplication


class EPHandle:
    """Routing of one ElasticBuffer.dispatch, for cached dispatches and combine.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as dispatch got them.
        topk_idx: int64 [T, K], a copy unless do_handle_copy=False.
        num_recv_tokens: received tokens N, or the worst case without do_cpu_sync.
        num_expanded_tokens: rows of the expanded layout, padding included, or the worst case.
        num_recv_tokens_per_expert_list: rows of each local expert, rounded up; empty without do_cpu_sync.
        psum_num_recv_tokens_per_scaleup_rank: int32 [R], inclusive sums of the tokens from each rank.
        psum_num_recv_tokens_per_expert: int32 [L], ends of the experts' rows: with padding, or without if do_expand.
        num_unaligned_recv_tokens_per_expert: int32 [L], rows of each local expert.
        recv_src_metadata: int32 [N, 2 + K]: source rank * num_max_tokens_per_rank + token; source rank * K + first
            entry that names a local expert; and the K expanded rows of the token, or -1.
        dst_buffer_slot_idx: int32 [T, K], place of the token among this rank's rows at each entry's rank, or -1.
        token_metadata_at_forward, channel_linked_list: None, as for ranks of one domain.
    """

    token_metadata_at_forward = channel_linked_list = None
    num_recv_tokens: int
    num_expanded_tokens: int
    num_rows: int  # of recv_x
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    slots: Tensor  # int64 [N, K]: expanded row of each received entry, or -1
    there: Tensor  # bool [N]: False for the rows of the worst case that were not received

    def __init__(
        self, owner: object, topk_idx: Tensor, num_experts: int, expert_alignment: int, num_max_tokens_per_rank: int,
        num_sms: int, do_expand: bool,
    ) -> None:  # fmt: skip
        self.owner, self.topk_idx, self.num_experts, self.do_expand = owner, topk_idx, num_experts, do_expand
        self.expert_alignment, self.num_max_tokens_per_rank = expert_alignment, num_max_tokens_per_rank
        self.num_sms = num_sms
        self.num_recv_tokens_per_expert_list: list[int] = []

    def fill(self, received: Received, num_ranks: int, do_cpu_sync: bool) -> None:
        """Set all attributes from the dispatch's result. Only do_cpu_sync makes the host wait for it."""
        plan, num_topk = received.handle, self.topk_idx.shape[1]
        ids = received.ids
        offs, num_local, align = plan.offs, self.num_experts // num_ranks, self.expert_alignment
        worst = num_ranks * self.num_max_tokens_per_rank
        num_rows = self.num_recv_tokens = int(offs[-1]) if do_cpu_sync else worst
        rows = torch.arange(num_rows, device=offs.device, dtype=torch.int32)
        self.there = rows < offs[-1]
        ids = ids[:num_rows].where(self.there.unsqueeze(1), -1).long()
        counts = torch.zeros(num_local + 1, dtype=torch.int64, device=offs.device)
        experts = ids.where(ids >= 0, num_local).flatten()
        counts = counts.scatter_add_(0, experts, torch.ones_like(experts))[:num_local]
        aligned = (counts + align - 1) // align * align
        ends = aligned.cumsum(0)
        starts = ends - aligned
        if do_cpu_sync:
            self.num_recv_tokens_per_expert_list = aligned.tolist()
            self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list)
        else:
            most = worst * min(num_topk, num_local) + (align - 1) * num_local
            self.num_expanded_tokens = -(-most // align) * align
        self.num_rows = self.num_expanded_tokens if self.do_expand else num_rows
        self.slots = _slots(experts, counts, starts).view(num_rows, num_topk)
        self.psum_num_recv_tokens_per_scaleup_rank = offs
        self.psum_num_recv_tokens_per_expert = (starts + counts if self.do_expand else ends).int()
        self.num_unaligned_recv_tokens_per_expert = counts.int()
        sources = torch.searchsorted(offs, rows, right=True, out_int32=True)
        tokens = sources * self.num_max_tokens_per_rank + plan.source_tokens[:num_rows]
        first = (ids >= 0).int().argmax(1).int()
        slots = self.slots.int() if self.do_expand else torch.full_like(self.slots, -1, dtype=torch.int32)
        self.recv_src_metadata = torch.cat([torch.stack([tokens, sources * num_topk + first], 1), slots], 1)
        ranks = ranks_of(self.topk_idx, self.num_experts, num_ranks)
        self.dst_buffer_slot_idx = _places(ranks, num_ranks).int()


class Expanded(NamedTuple):
    """Maps from the expanded layout to received tokens.

    Attributes:
        entries: int64 [rows], index of each row's entry in the flattened [N, K], 0 for padding.
        real: bool [rows], False for padding.
    """

    entries: Tensor
    real: Tensor


def expanded(handle: EPHandle) -> Expanded:
    """Return the map of the handle's expanded rows."""
    slots = handle.slots.flatten()
    entries = slots.new_full((handle.num_expanded_tokens + 1,), -1)  # the last one takes entries without a row
    numbers = torch.arange(len(slots), device=slots.device)
    entries.scatter_(0, slots.where(slots >= 0, handle.num_expanded_tokens), numbers)
    entries = entries[:-1]
    return Expanded(entries.clamp(min=0), entries >= 0)


def columns_of(scales: Tensor) -> Tensor:
    """Return scales [rows, S] whose columns are contiguous and begin at multiples of 16 bytes."""
    rows, columns = scales.shape
    tall = -(-rows // SCALES_PER_16_BYTES) * SCALES_PER_16_BYTES
    out = scales.new_empty(columns, tall)[:, :rows].T
    return out.copy_(scales)


def ranks_of(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Return int64 [T, K]: the rank of each entry's expert; -1 stays -1."""
    return topk_idx // (num_experts // num_ranks)


def _slots(experts: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
    """Return the row of each entry if each expert's entries follow each other from its start; -1 for no expert."""
    order = experts.argsort(stable=True)
    known = experts[order].clamp(max=len(counts) - 1)
    places = torch.arange(len(experts), device=experts.device) - (counts.cumsum(0) - counts)[known] + starts[known]
    return torch.empty_like(places).scatter_(0, order, places.where(experts[order] < len(counts), -1))


def _places(ranks: Tensor, num_ranks: int) -> Tensor:
    """Return int64 [T, K]: number of earlier tokens that visit each entry's rank; -1 for no rank."""
    visited = torch.zeros(len(ranks), num_ranks + 1, dtype=torch.int64, device=ranks.device)
    visited.scatter_(1, ranks.where(ranks >= 0, num_ranks), 1)
    before = visited.cumsum(0) - visited
    return before.gather(1, ranks.clamp(min=0)).where(ranks >= 0, -1)
