"""Runs whose digests are compared, and functions that ranks run for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from routes.cases_routes import H, Mixed, T, batch, step
from torch import nn

from moe_rt import diagnostics

RANKS = 4


def run(group: Any, path: str, changes: dict[str, Any], how: str | None = None) -> None:
    """Take two steps of two micro-batches, without changing parameters; ranks share the batch of four.

    Args:
        changes: at: see Poke. weight: the name of a parameter to change. tokens: of the digest. options: of the layers.
            sequences: give the layers sequences of T tokens, and let each rank's balance losses count 1 / ranks.
    """
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    shape = (-1, T, H) if changes.get("sequences") else (-1, H)
    coefs = dict(aux_loss_coef=0.1 / size, z_loss_coef=0.01 / size) if changes.get("sequences") else {}
    model = Mixed(group, how, num_max_tokens_per_rank=RANKS * T, **coefs, **changes.get("options", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if "weight" in changes and rank == changes.get("rank", rank):
        with torch.no_grad():
            p = dict(model.named_parameters())[changes["weight"]]
            p.view(-1)[0] += 1e-3
    poke = Poke(*changes.get("at", ()))
    with diagnostics.digest(model, Path(path), tokens=changes.get("tokens", False)):
        for number in range(2):
            xs = [torch.cat([batch(r, 2 * number + n).detach() for r in range(RANKS)]) for n in range(2)]
            own = [poke(x.chunk(size)[rank], number, n, rank).view(shape).requires_grad_() for n, x in enumerate(xs)]
            step(model, own)
            optimizer.step()
        model.eval()(own[0])  # after the last step
    model.close()


class Poke(nn.Module):
    """Changes one element of an input, at one step, micro-batch, rank and token."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: torch.Tensor, *where: int) -> torch.Tensor:
        if self.at and where == self.at[:3]:
            x = x.clone()
            x[self.at[3], H // 2] += 1e-3
        return x
