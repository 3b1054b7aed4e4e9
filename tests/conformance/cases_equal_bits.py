"""A batch of tokens split over any number of ranks, as functions of a rank, and one process that computes all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rt import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.ops.reference import through_codec

E, K = 11, 3
KINDS = ("random", "zipf", "one_hot_expert")


@dataclass(frozen=True)
class Batch:
    """All tokens, in rank order, and the gradient of their outputs."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    grad: Tensor


def make_batch(tokens: int, hidden: int, dtype: torch.dtype, kind: str, seed: int = 0) -> Batch:
    """Draw a batch; "random" ids include duplicates and -1, "zipf" prefers low ids, others visit expert 0."""
    g = torch.Generator().manual_seed(seed)
    if kind == "random":
        idx = torch.randint(-1, E, (tokens, K), generator=g)
    elif kind == "zipf":
        idx = torch.multinomial(1.0 / torch.arange(1, E + 1).repeat(tokens, 1), K, generator=g)
    else:
        idx = torch.zeros(tokens, K, dtype=torch.int64)
        idx[:, 1] = torch.randint(1, E, (tokens,), generator=g)
        idx[:, 2] = -1
    x, grad = (torch.randn(tokens, hidden, generator=g).to(dtype) for _ in range(2))
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    return Batch(x, idx, torch.rand(tokens, K, generator=g, dtype=acc) - 0.3, grad)


def splits(tokens: int, size: int) -> list[int]:
    """Return token counts of the ranks, uneven, zero on some ranks of a large group."""
    counts = [0 if size > 2 and rank % 3 == 1 else 1 + 2 * rank for rank in range(size)]
    total = sum(counts)
    counts = [c * tokens // total for c in counts]
    counts[-1] += tokens - sum(counts)
    return counts


def of_expert(rows: Tensor, expert: int) -> Tensor:
    """Return an expert's output, element by element."""
    return rows * (expert + 1.5) - 0.25


def in_one_process(batch: Batch, there: Any, home: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, the gradient of x, and that of the weights, by a loop over each token's entries.

    An expert that a token names twice runs once, for the sum of both weights. The last result's dot products are
    summed in another order than the engine's.
    """
    x, acc = through_codec(batch.x, there), batch.weights.dtype
    outs, grads_x, grads_w = [], [], []
    for t, ids in enumerate(batch.idx.tolist()):
        out, grad_x, grad_w = torch.zeros(x.shape[1], dtype=acc), torch.zeros(x.shape[1], dtype=acc), torch.zeros(K)
        for k, expert in enumerate(ids):
            if expert < 0 or expert in ids[:k]:
                continue
            again = [j for j in range(K) if ids[j] == expert]
            weight = batch.weights[t, k].clone()
            for j in again[1:]:
                weight += batch.weights[t, j]
            y = of_expert(x[t], expert)
            out += weight * through_codec(y.to(acc)[None], home)[0]
            grad_y = (weight * batch.grad[t].to(acc)).to(x.dtype)
            grad_x += (grad_y * (expert + 1.5)).to(acc)
            grad_w[again] = (batch.grad[t].double() @ y.double()).float()
        outs.append(out.to(x.dtype)), grads_x.append(grad_x.to(x.dtype)), grads_w.append(grad_w)
    return torch.stack(outs), torch.stack(grads_x), torch.stack(grads_w)


def rows_of_experts(recv_x: Tensor, handle: Handle, expert_ids: list[int]) -> Tensor:
    """Run this rank's experts."""
    y, start = torch.full_like(recv_x, float("nan")), 0
    ends = handle.ends.tolist()
    for expert, end, stop in zip(expert_ids, ends, handle.offs.tolist(), strict=True):
        y[start:end] = of_expert(recv_x[start:end], expert)
        start = stop
    return y


def one_rank(group: Any, batch: Batch, options: dict[str, Any], counts: list[int]) -> tuple[Tensor, ...]:
    """Return this rank's part of the outputs and both gradients."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    sizes = dict(num_max_tokens_per_rank=len(batch.x), num_experts=E, num_topk=K, hidden=batch.x.shape[1])
    with Buffer(group, sums="invariant", dtype=batch.x.dtype, timeout_s=60.0, **sizes, **options) as buffer:
        for _ in range(2):  # both windows
            x, weights = (t[mine].clone().requires_grad_() for t in (batch.x, batch.weights))
            recv_x, recv_weights, handle = buffer.dispatch(x, batch.idx[mine], weights, tag=1)
            y = rows_of_experts(recv_x, handle, list(buffer.spec.placement.local_experts(rank)))
            out = buffer.combine(y, recv_weights, handle)
            grads = torch.autograd.grad(out, [x, weights], batch.grad[mine])
        return tuple(t.detach() for t in (out, *grads))
