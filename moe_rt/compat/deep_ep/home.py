"""Rows that return to their tokens one by one, and their sum there in the order of the token's experts.

Buffer.combine adds the ranks' rows in rank order. DeepEP V2 adds them in the order of topk_idx and begins with the
bias, so rows travel home by a dispatch in the other direction, whose order both sides know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.compat.deep_ep.exchange import Exchange, Received, Rows


def last_entries(ranks: Tensor, num_ranks: int) -> Tensor:
    """Return int64 [T, min(K, R)]: each token's ranks in the order of the last entry that names them, then -1."""
    same = ranks.unsqueeze(2) == ranks.unsqueeze(1)
    named_later = same.triu(1).any(2)
    return in_front(ranks.masked_fill(named_later, -1), num_ranks)


def in_front(entries: Tensor, most: int) -> Tensor:
    """Return the entries [T, K] that are not -1 in their order, then -1: at most `most` of them."""
    order = (entries < 0).to(torch.uint8).argsort(stable=True)
    return entries.gather(1, order[:, : min(most, entries.shape[1])])


def places_at_home(ranks: Tensor) -> Tensor:
    """Return int64 [T, J]: where the row of each entry arrives, in the order rank, token, entry; -1 for no rank."""
    flat = ranks.flatten()
    order = flat.where(flat >= 0, torch.iinfo(flat.dtype).max).argsort(stable=True)
    places = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    return places.where(flat >= 0, -1).view(ranks.shape)


def add_in_order(rows: Tensor, places: Tensor, first: Tensor | None = None) -> Tensor:
    """Return float32 [T, H]: `first`, or 0, plus the rows [N, H] at places [T, J], column by column; -1 adds none."""
    total = rows.new_zeros(len(places), rows.shape[1], dtype=torch.float32) if first is None else first
    for column in places.unbind(1):
        there = (column >= 0).unsqueeze(1)
        total.add_(rows.index_select(0, column.clamp(min=0)).where(there, 0))
    return total


def sources_of(metadata: Tensor, num_max_tokens: int, there: Tensor) -> Tensor:
    """Return int64 [N, 1]: the source rank of each received row; -1 for a row that was not received."""
    return (metadata[:, 0] // num_max_tokens).long().where(there, -1).unsqueeze(1)


def size_of(hidden: int, num_ranks: int, dtype: torch.dtype = torch.bfloat16) -> Rows:
    """Return the size and routing of rows that return."""
    return Rows("tokens", hidden, 1, num_ranks, dtype)


def add_weights(received: Received, in_rank: Tensor, num_topk: int) -> Tensor:
    """Return float32 [T, K]: the sum, in rank order, of the weights that the ranks of each token returned.

    Args:
        in_rank: bool [T, R], True if the token visits the rank.
    """
    rows, offs, (num_tokens, num_ranks) = received.x, received.handle.offs, in_rank.shape
    if not rows.is_cpu:
        ranks = torch.arange(num_ranks, device=in_rank.device)
        return add_in_order(rows, places_at_home(torch.where(in_rank, ranks, -1)))[:, :num_topk].contiguous()
    out, visits = rows.new_empty(num_tokens, num_topk), in_rank.contiguous()
    given = rows.data_ptr(), rows.shape[1], offs.data_ptr(), visits.data_ptr()
    _engine.add_weights(*given, num_tokens, num_ranks, num_topk, out.data_ptr())
    return out


def send_weights_home(exchange: Exchange, weights: Tensor, ranks: Tensor) -> Received:
    """Send weights [N, K] to ranks int64 [N, 1], as rows of a multiple of 16 bytes. Collective."""
    beyond = -weights.shape[1] % 4
    return send_home(exchange, torch.nn.functional.pad(weights, (0, beyond)) if beyond else weights, None, ranks)


def source_ranks(offs: Tensor, num_rows: int) -> Tensor:
    """Return int64 [N, 1]: the source of each received row, of which each source's end at offs; then -1."""
    if not offs.is_cpu:
        rows = torch.arange(num_rows, dtype=torch.int32, device=offs.device)
        return torch.searchsorted(offs, rows, right=True).where(rows < offs[-1], -1).unsqueeze(1)
    out = offs.new_empty(num_rows, 1, dtype=torch.int64)
    _engine.source_ranks(offs.data_ptr(), offs.shape[0], num_rows, out.data_ptr())
    return out


def send_home(exchange: Exchange, rows: Tensor, index: Tensor | None, ranks: Tensor) -> Received:
    """Send rows [N, H] to ranks int64 [N', 1], -1 for none, and return what came here. Collective.

    Args:
        index: int64 [N'], the row to send for each rank; None: the rows as they are.
    """
    size = size_of(rows.shape[1], exchange.num_ranks, rows.dtype)
    ones = torch.ones(ranks.shape, device=ranks.device)
    x = rows if index is None else lambda window: torch.index_select(rows, 0, index, out=window)
    return exchange.dispatch(size, x, ranks, ones)
