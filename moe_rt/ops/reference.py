"""Reference implementation: dispatch and combine of a whole group in plain torch loops, written for clarity.

Every function takes and returns lists over ranks. Sums are taken in the engine's order, so results agree bit for bit;
only the dot products of combine's backward are summed in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology


@dataclass(frozen=True)
class Row:
    """One row of a rank's recv_x: its local expert, source rank and token.

    A padding row has -1 in all three, and weight zero.
    """

    expert: int
    source: int
    token: int
    weight: Tensor  # sum over the token's top-k entries that name the expert
    entry: int = 0  # the first of these entries


@dataclass(frozen=True)
class TokenRow:
    """One row of recv_x with layout="tokens": its source rank and token, and the entries for experts of this rank."""

    source: int
    token: int
    # Both are [K]. An expert is a local id, or -1 if the entry names another rank's expert or repeats an earlier entry.
    experts: list[int]
    weights: list[Tensor]  # summed over the entries that name the expert


@dataclass(frozen=True)
class Received:
    """Result of dispatch on one rank. `rows` (Row or TokenRow) includes rows dropped by overflow."""

    recv_x: Tensor
    recv_weights: Tensor
    offs: Tensor
    rows: Sequence[Any]
    recv_topk_idx: Tensor | None = None
    real_ends: Tensor | None = None
    recv_scales: Tensor | None = None

    @property
    def padding(self) -> Tensor:
        """Bool per kept row: True for padding."""
        return torch.tensor([row.source < 0 for row in self.kept], dtype=torch.bool)

    @property
    def kept(self) -> Sequence[Any]:
        """Rows that recv_x holds."""
        return self.rows[: len(self.recv_x)]


def dispatch(
    xs: list[Tensor],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor],
    spec: BufferSpec,
    max_tokens: int | None = None,
) -> list[Received]:
    """Return each rank's rows, cut at the capacity for max_tokens.

    Rows are in the order local expert, source rank, token; with layout "tokens" in the order source rank, token.
    """
    if spec.by_token:
        return _dispatch_tokens(xs, topk_idx, topk_weights, spec, max_tokens)
    received = []
    entries = [idx.tolist() for idx in topk_idx]
    sent, zero = [through_codec(x, spec.dispatch_dtype) for x in xs], torch.zeros(spec.hidden, dtype=spec.dtype)
    for rank in range(spec.num_ranks):
        rows: list[Row] = []
        ends: list[int] = []
        real_ends: list[int] = []
        for local, expert in enumerate(spec.placement.local_experts(rank)):
            for source, (tokens, weights) in enumerate(zip(entries, topk_weights, strict=True)):
                for token, experts in enumerate(tokens):
                    hits = [k for k in range(spec.num_topk) if experts[k] == expert]
                    if hits:
                        weight = sum((weights[token, k] for k in hits[1:]), start=weights[token, hits[0]])
                        rows.append(Row(local, source, token, weight.to(spec.acc_dtype), hits[0]))
            real_ends.append(len(rows))
            rows += [Row(-1, -1, -1, torch.zeros((), dtype=spec.acc_dtype))] * (-len(rows) % spec.expert_alignment)
            ends.append(len(rows))
        capacity = spec.capacity(rank, max_tokens)
        kept = rows[:capacity]
        received.append(
            Received(
                stacked([sent[r.source][r.token] if r.source >= 0 else zero for r in kept], zero),
                stacked([r.weight for r in kept], torch.zeros((), dtype=spec.acc_dtype)),
                torch.tensor(ends, dtype=torch.int32).clamp(max=capacity),
                rows,
                real_ends=torch.tensor(real_ends, dtype=torch.int32).clamp(max=capacity),
            )
        )
    return received


def _dispatch_tokens(
    xs: list[Tensor],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor],
    spec: BufferSpec,
    max_tokens: int | None = None,
) -> list[Received]:
    """Return each rank's rows in the order source rank, token."""
    received = []
    sent = [through_codec(x, spec.dispatch_dtype) for x in xs]
    for rank in range(spec.num_ranks):
        here = spec.placement.local_experts(rank)
        rows: list[TokenRow] = []
        ends: list[int] = []
        for source, (idx, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
            for token in range(len(idx)):
                row = TokenRow(source, token, *_entries(idx[token].tolist(), weights[token], here, spec))
                if max(row.experts) >= 0:
                    rows.append(row)
            ends.append(len(rows))
        capacity = spec.capacity(rank, max_tokens)
        kept = rows[:capacity]
        k = spec.num_topk
        received.append(
            Received(
                stacked([sent[r.source][r.token] for r in kept], torch.zeros(spec.hidden, dtype=spec.dtype)),
                stacked([torch.stack(r.weights) for r in kept], torch.zeros(k, dtype=spec.acc_dtype)),
                torch.tensor(ends, dtype=torch.int32).clamp(max=capacity),
                rows,
                torch.tensor([r.experts for r in kept], dtype=torch.int32).view(-1, k),
            )
        )
    return received


def _entries(
    ids: list[int], weights: Tensor, here: tuple[int, ...] | list[int], spec: BufferSpec
) -> tuple[list[int], list[Tensor]]:
    """Return the local experts of one token's entries, and their weights, summed at an expert's first entry."""
    local = [-1] * len(ids)
    summed = [torch.zeros((), dtype=spec.acc_dtype) for _ in ids]
    for k, expert in enumerate(ids):
        first = ids.index(expert)
        if expert in here:
            local[first] = list(here).index(expert)
            summed[first] = weights[k] if k == first else summed[first] + weights[k]
    return local, summed


def dispatch_scaled(
    sent: list[tuple[Tensor, Tensor]],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor],
    spec: BufferSpec,
    max_tokens: int | None = None,
) -> list[Received]:
    """Dispatch (codes, scales) in the layout of the spec; recv_x holds codes, recv_scales their scales."""
    plain = [torch.zeros(len(codes), spec.hidden, dtype=spec.dtype) for codes, _ in sent]
    received = dispatch(plain, topk_idx, topk_weights, spec, max_tokens)
    codes, scales = ([pair[part] for pair in sent] for part in (0, 1))
    return [replace(r, recv_x=_taken(codes, r), recv_scales=_taken(scales, r)) for r in received]


def _taken(sent: list[Tensor], received: Received) -> Tensor:
    """Select one rank's received rows from the tensors of all ranks; padding is zero."""
    zero = torch.zeros(sent[0].shape[1:], dtype=sent[0].dtype)
    rows = [sent[row.source][row.token] if row.source >= 0 else zero for row in received.kept]
    return stacked(rows, zero)


def stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    """Stack rows of the shape and dtype of `like`; the list may be empty."""
    return torch.stack(rows) if rows else like.new_empty(0, *like.shape)


def through_codec(rows: Tensor, codec: torch.dtype | None) -> Tensor:
    """Return rows [N, H] coded and decoded, in their own dtype, with one scale per 128 elements (core/codec.h)."""
    if codec is None:
        return rows
    codes, scales = code(rows, codec)
    return (codes.float() * scales.repeat_interleave(128, 1)[:, : rows.shape[1]]).to(rows.dtype)


def code(rows: Tensor, codec: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes [N, H] of rows [N, H] and their fp32 scales [N, ceil(H / 128)]."""
    num_blocks = -(-rows.shape[1] // 128)
    padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % 128)).view(len(rows), num_blocks, 128)
    largest = padded.abs().amax(-1, keepdim=True)
    # `most` is a tensor, because torch divides a number by a tensor as number * reciprocal, which rounds twice.
    most = torch.full_like(largest, 448.0 if codec is torch.float8_e4m3fn else 127.0)
    coded = largest >= 2.0**-100
    scaled = torch.where(coded & largest.isfinite(), padded * (most / largest), 0.0)
    codes = (scaled.to(codec).float() if codec is torch.float8_e4m3fn else scaled.round()) + 0.0  # turns -0 into 0
    scales = torch.where(largest.isfinite(), torch.where(coded, largest / most, 0.0), float("nan"))
    return codes.view(len(rows), num_blocks * 128)[:, : rows.shape[1]].to(codec), scales.squeeze(-1)


def factors(received: list[Received], spec: BufferSpec) -> list[Tensor]:
    """Return the factors by which combine multiplies rows: their weights, or 1 with layout="tokens"."""
    if spec.by_token:
        return [torch.ones(len(r.recv_x), dtype=spec.acc_dtype) for r in received]
    return [r.recv_weights for r in received]


def combine(
    ys: list[Tensor],
    recv_weights: list[Tensor],
    received: list[Received],
    num_tokens: list[int],
    spec: BufferSpec,
    codec: torch.dtype | None = None,
) -> list[Tensor]:
    """Return out[t] on each rank: the sum over nodes, in order, of each node's sum over its ranks, in rank order.

    A rank's partial is the sum over its rows of t, rounded to the dtype of rows, or coded from the accumulator with
    `codec`. A node's sum of several partials is rounded to the dtype of rows and then coded. With route="flat" each
    rank counts as a node.
    """
    if spec.sums == "invariant":
        return combine_entries(ys, recv_weights, received, num_tokens, spec, codec)
    outs = []
    topology = spec.topology if spec.route == "two_level" else Topology(tuple(range(spec.num_ranks)))
    for source in range(spec.num_ranks):
        out = torch.zeros(num_tokens[source], spec.hidden, dtype=spec.acc_dtype)
        for node in range(topology.num_nodes):
            of_node, num_partials = torch.zeros_like(out), torch.zeros(len(out), 1, dtype=torch.int64)
            for rank in topology.ranks_of(node):
                at = [i for i, row in enumerate(received[rank].kept) if row.source == source]
                tokens = torch.tensor([received[rank].rows[i].token for i in at], dtype=torch.int64)
                weighted = recv_weights[rank][at, None] * ys[rank][at].to(spec.acc_dtype)
                partial = torch.zeros_like(out).index_add_(0, tokens, weighted)  # one row after the other
                of_node += partial.to(spec.dtype).to(spec.acc_dtype) if codec is None else through_codec(partial, codec)
                num_partials[list({row.token for row in received[rank].rows if row.source == source})] += 1
            rounded = through_codec(of_node.to(spec.dtype).to(spec.acc_dtype), codec)
            out += torch.where(num_partials > 1, rounded, of_node)
        outs.append(out.to(spec.dtype))
    return outs


def combine_entries(
    ys: list[Tensor],
    recv_weights: list[Tensor],
    received: list[Received],
    num_tokens: list[int],
    spec: BufferSpec,
    codec: torch.dtype | None = None,
) -> list[Tensor]:
    """Return out[t] on each rank: the sum of weight * row in the order of t's top-k entries, as one process adds them.

    A row is rounded only by `codec`. The row of a repeated expert is added at the first entry that names it.
    """
    returned: dict[tuple[int, int, int], Tensor] = {}  # by source, token, and first top-k entry
    for r, weights, y in zip(received, recv_weights, ys, strict=True):
        rows = y.to(spec.acc_dtype) if codec is None else through_codec(y.to(spec.acc_dtype), codec)
        for i, row in enumerate(r.kept):
            if row.source >= 0:
                returned[row.source, row.token, row.entry] = weights[i] * rows[i]
    outs = []
    for source in range(spec.num_ranks):
        out = torch.zeros(num_tokens[source], spec.hidden, dtype=spec.acc_dtype)
        for t in range(len(out)):
            for k in range(spec.num_topk):
                if (source, t, k) in returned:
                    out[t] += returned[source, t, k]
        outs.append(out.to(spec.dtype))
    return outs


def combine_backward(
    grad_outs: list[Tensor], ys: list[Tensor], recv_weights: list[Tensor], received: list[Received], spec: BufferSpec
) -> list[tuple[Tensor, Tensor]]:
    """Return grad_y[row] = weight * grad_out[token] and grad_recv_weights[row] = <grad_out[token], y[row]>, or zero."""
    grads = []
    for rank in range(spec.num_ranks):
        rows = received[rank].kept
        zero = torch.zeros(spec.hidden, dtype=spec.dtype)
        of_rows = [grad_outs[r.source][r.token] if r.source >= 0 else zero for r in rows]
        g = stacked(of_rows, zero).to(spec.acc_dtype)
        w, y = recv_weights[rank][: len(rows), None], ys[rank][: len(rows)].to(spec.acc_dtype)
        grads.append(((w * g).to(spec.dtype), (g * y).sum(1)))
    return grads


def dispatch_backward(
    grad_recv_x: list[Tensor],
    grad_recv_weights: list[Tensor],
    received: list[Received],
    topk_idx: list[Tensor],
    spec: BufferSpec,
) -> list[tuple[Tensor, Tensor]]:
    """Return grad_x, by combine with unit weights, and grad_topk_weights[t, k], the gradient of that entry's row."""
    if spec.by_token:
        return _dispatch_tokens_backward(grad_recv_x, grad_recv_weights, received, topk_idx, spec)
    ones = [torch.ones_like(w) for w in grad_recv_weights]
    grad_x = combine(grad_recv_x, ones, received, [len(i) for i in topk_idx], spec)
    grads = []
    for source, idx in enumerate(topk_idx):
        grad_w = torch.zeros(idx.shape, dtype=spec.acc_dtype)
        for rank in range(spec.num_ranks):
            experts = spec.placement.local_experts(rank)
            for i, row in enumerate(received[rank].kept):
                if row.source == source:
                    grad_w[row.token, idx[row.token] == experts[row.expert]] = grad_recv_weights[rank][i]
        grads.append((grad_x[source], grad_w))
    return grads


def _dispatch_tokens_backward(
    grad_recv_x: list[Tensor],
    grad_recv_weights: list[Tensor],
    received: list[Received],
    topk_idx: list[Tensor],
    spec: BufferSpec,
) -> list[tuple[Tensor, Tensor]]:
    """Return grad_x, by combine, and grad_topk_weights[t, k], the gradient of t's first entry with the same expert."""
    grad_x = combine(grad_recv_x, factors(received, spec), received, [len(i) for i in topk_idx], spec)
    grad_w = [torch.zeros(idx.shape, dtype=spec.acc_dtype) for idx in topk_idx]
    for r, grads in zip(received, grad_recv_weights, strict=True):
        for i, row in enumerate(r.kept):
            ids = topk_idx[row.source][row.token]
            for k, expert in enumerate(row.experts):
                if expert >= 0:
                    grad_w[row.source][row.token, ids == ids[k]] = grads[i, k]
    return list(zip(grad_x, grad_w, strict=True))
