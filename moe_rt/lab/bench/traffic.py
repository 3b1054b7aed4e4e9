"""Bytes that an op has to move: as published figures count them, as protocols move them, and the minimum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rt.config.placement import Placement
from moe_rt.lab.bench.cases import Case

# Transfers of each token in an op: to the experts, back, or both. A layer's forward is a pair.
TRIPS = {"dispatch": 1, "combine": 1, "pair": 2, "layer": 2}


@dataclass(frozen=True)
class Traffic:
    """Rows of one rank in one dispatch or combine.

    Attributes:
        tokens: T, tokens of this rank.
        copies: N, rows received by this rank: one for each (token, local expert).
        visits: U, distinct ranks summed over this rank's tokens, including this rank itself.
        guests, away: (token, rank) pairs that cross the link to this rank, and from it.
    """

    tokens: int
    copies: int
    visits: int
    guests: int
    away: int

    def copied_rows(self, op: str) -> float:
        """Rows that a copy of the same traffic copies: half of the rows read plus the rows written.

        It is the minimum if each token crosses the link once per rank. dispatch writes N rows, each a copy of one of T.
        combine reads N rows, writes the partial sums of its guests, reads the partial sums of its own tokens that were
        away, and writes T rows. pair reads T and writes N, then does the same as combine.
        """
        combine = self.copies + self.guests + self.away + self.tokens
        pair = self.tokens + self.copies + combine
        return {"dispatch": float(self.copies), "combine": combine / 2, "pair": pair / 2}[op]


def count(case: Case, topk_idx: list[Tensor]) -> list[Traffic]:
    """Traffic of every rank, from the routing of every rank."""
    owner = torch.tensor(Placement.contiguous(case.experts, case.ranks).ranks)
    # [source rank, destination rank], in copies and in distinct tokens
    copies = torch.stack([owner[idx].view(-1).bincount(minlength=case.ranks) for idx in topk_idx])
    visits = torch.stack([_visited(owner[idx], case.ranks).sum(0) for idx in topk_idx])
    return [
        Traffic(
            tokens=len(topk_idx[rank]),
            copies=int(copies[:, rank].sum()),
            visits=int(visits[rank].sum()),
            guests=int(visits[:, rank].sum() - visits[rank, rank]),
            away=int(visits[rank].sum() - visits[rank, rank]),
        )
        for rank in range(case.ranks)
    ]


def bytes_moved(case: Case, traffic: list[Traffic]) -> dict[str, int]:
    """Bytes of the op, averaged over ranks.

    logical: T * K rows each way, as if every (token, expert) crossed the link; most published bandwidths count this.
    physical: one row for each (token, distinct rank), each way. wire: the part of it that leaves its rank.
    """
    trips = TRIPS[case.op] * case.row_bytes
    return {
        "logical": trips * case.tokens * case.topk,
        "physical": trips * sum(t.visits for t in traffic) // case.ranks,
        "wire": trips * sum(t.away for t in traffic) // case.ranks,
    }


def _visited(owner: Tensor, ranks: int) -> Tensor:
    return torch.zeros(len(owner), ranks, dtype=torch.bool).scatter_(1, owner, True)
