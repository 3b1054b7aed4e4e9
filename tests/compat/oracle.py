"""Results that DeepEP's contract gives each rank, computed in plain torch from the inputs of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """Inputs of all ranks: rows [T, H], expert ids and weights [T, K], with T of each rank."""

    x: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    num_experts: int

    @property
    def num_ranks(self) -> int:
        return len(self.x)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks


def make_job(num_ranks: int, num_tokens: list[int], hidden: int, num_topk: int, num_experts: int, seed: int = 0) -> Job:
    """Make random inputs, in which one entry in eight names no expert."""
    random = torch.Generator().manual_seed(seed)
    x, ids, weights = [], [], []
    for tokens in num_tokens[:num_ranks]:
        x.append(torch.randn(tokens, hidden, generator=random).bfloat16())
        chosen = torch.rand(tokens, num_experts, generator=random).topk(num_topk).indices
        ids.append(chosen.masked_fill(torch.rand(tokens, num_topk, generator=random) < 0.125, -1))
        weights.append(torch.rand(tokens, num_topk, generator=random))
    return Job(x, ids, weights, num_experts)


def visits(job: Job, source: int) -> Tensor:
    """Return bool [T, R]: the ranks that each token of a rank visits, found entry by entry."""
    in_rank = torch.zeros(len(job.x[source]), job.num_ranks, dtype=torch.bool)
    for token, ids in enumerate(job.topk_idx[source].tolist()):
        for expert in ids:
            if expert >= 0:
                in_rank[token, expert // job.num_local] = True
    return in_rank


def received(job: Job, rank: int) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Return what normal dispatch gives: rows, local ids, weights, counts of experts, and counts of source ranks."""
    rows, ids, weights, sources = [], [], [], []
    for source in range(job.num_ranks):
        came = visits(job, source)[:, rank]
        local = job.topk_idx[source][came] - rank * job.num_local
        own = (local >= 0) & (local < job.num_local) & (job.topk_idx[source][came] >= 0)
        rows.append(job.x[source][came])
        ids.append(local.where(own, -1))
        weights.append(job.topk_weights[source][came].where(own, 0.0))
        sources.append(int(came.sum()))
    all_ids = torch.cat(ids)
    counts = [int((all_ids == expert).sum()) for expert in range(job.num_local)]
    return torch.cat(rows), all_ids, torch.cat(weights), counts, sources


def expert_rows(job: Job, rank: int, expert: int) -> list[tuple[int, int]]:
    """Return (source, token) of each row that low-latency dispatch gives a local expert, in order."""
    wanted = rank * job.num_local + expert
    pairs = [(source, ids) for source in range(job.num_ranks) for ids in [job.topk_idx[source]]]
    return [(source, int(token)) for source, ids in pairs for token in (ids == wanted).any(1).nonzero()]


def weighted(job: Job, rank: int, outputs: dict[int, Tensor]) -> Tensor:
    """Return low-latency combine: the sum of weights times each expert's bfloat16 output of this rank's tokens.

    Args:
        outputs: for each expert, its outputs [T, H] for all tokens of this rank.
    """
    total = torch.zeros(job.x[rank].shape)
    for k in range(job.topk_idx[rank].shape[1]):
        for token, expert in enumerate(job.topk_idx[rank][:, k].tolist()):
            if expert >= 0:
                total[token] += job.topk_weights[rank][token, k] * outputs[expert][token].float()
    return total
