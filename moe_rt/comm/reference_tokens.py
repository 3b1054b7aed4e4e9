"""Reference implementation for layout="tokens". Its combine is that of reference.py with unit weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rt.comm import reference
from moe_rt.config.spec import BufferSpec


@dataclass(frozen=True)
class TokenRow:
    """One row of a rank's recv_x: its source rank and token, and the entries that are for this rank."""

    source: int
    token: int
    # Both are [K]. An expert is a local id, or -1 if the entry names another rank's expert or repeats an earlier entry.
    experts: list[int]
    weights: list[Tensor]  # summed over the entries that name the expert


def dispatch(
    xs: list[Tensor],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor],
    spec: BufferSpec,
    max_tokens: int | None = None,
) -> list[reference.Received]:
    """Return each rank's rows in the order source rank, token, cut at the capacity for max_tokens."""
    received = []
    sent = [reference.through_codec(x, spec.dispatch_dtype) for x in xs]
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
            reference.Received(
                reference.stacked([sent[r.source][r.token] for r in kept], torch.zeros(spec.hidden, dtype=spec.dtype)),
                reference.stacked([torch.stack(r.weights) for r in kept], torch.zeros(k, dtype=spec.acc_dtype)),
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


def ones(received: list[reference.Received], spec: BufferSpec) -> list[Tensor]:
    """Return unit weights, with which reference.combine and its backward implement this layout."""
    return [torch.ones(len(r.recv_x), dtype=spec.acc_dtype) for r in received]


def dispatch_backward(
    grad_recv_x: list[Tensor],
    grad_recv_weights: list[Tensor],
    received: list[reference.Received],
    topk_idx: list[Tensor],
    spec: BufferSpec,
) -> list[tuple[Tensor, Tensor]]:
    """Return grad_x, by combine, and grad_topk_weights[t, k], the gradient of t's first entry with the same expert."""
    grad_x = reference.combine(grad_recv_x, ones(received, spec), received, [len(i) for i in topk_idx], spec)
    grad_w = [torch.zeros(idx.shape, dtype=spec.acc_dtype) for idx in topk_idx]
    for r, grads in zip(received, grad_recv_weights, strict=True):
        for i, row in enumerate(r.kept):
            ids = topk_idx[row.source][row.token]
            for k, expert in enumerate(row.experts):
                if expert >= 0:
                    grad_w[row.source][row.token, ids == ids[k]] = grads[i, k]
    return list(zip(grad_x, grad_w, strict=True))
