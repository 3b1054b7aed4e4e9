"""Seeded inputs that every rank can make for all ranks, so that each can compute the whole group's reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rt.config import BufferSpec


@dataclass
class Inputs:
    """One dispatch of a whole group, lists over ranks."""

    xs: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]


def make_inputs(spec: BufferSpec, num_tokens: list[int], seed: int, kind: str = "random") -> Inputs:
    """kind: "random" ids with -1 and duplicates, "topk" distinct ids, "one_expert" all tokens to expert 0."""
    g = torch.Generator().manual_seed(seed)
    inputs = Inputs([], [], [])
    for n in num_tokens:
        inputs.xs.append(torch.randn(n, spec.hidden, generator=g).to(spec.dtype))
        if kind == "random":
            idx = torch.randint(-1, spec.num_experts, (n, spec.num_topk), generator=g)
        elif kind == "topk":
            idx = torch.rand(n, spec.num_experts, generator=g).topk(spec.num_topk).indices
        else:
            idx = torch.full((n, spec.num_topk), -1)
            idx[:, 0] = 0
        inputs.topk_idx.append(idx)
        inputs.topk_weights.append(torch.rand(n, spec.num_topk, generator=g, dtype=spec.acc_dtype))
    return inputs


def make_spec(num_ranks: int, **changes: object) -> BufferSpec:
    """A small spec with some fields changed."""
    fields: dict[str, object] = {
        "num_max_tokens_per_rank": 12,
        "hidden": 20,
        "num_topk": 3,
        "num_experts": 9,
        "dtype": torch.float32,
        "placement": None,
        "capacity_factor": None,
        "overflow": "raise",
        **changes,
    }
    return BufferSpec.make(num_ranks=num_ranks, **fields)  # type: ignore[arg-type]


def buffer_kwargs(spec: BufferSpec) -> dict[str, object]:
    """The Buffer arguments that make this spec."""
    names = ("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts", "dtype", "placement", "capacity_factor")
    return {**{n: getattr(spec, n) for n in names}, "overflow": spec.overflow}
