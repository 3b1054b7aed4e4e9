"""Seeded inputs of every contestant. Any rank can make any rank's inputs, so each can check the others'."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from moe_rt.errors import InvalidConfig, expect
from moe_rt.lab.bench.cases import Case
from moe_rt.routes.file import load

ROUTING_HELP = "uniform, lognormal:SIGMA, onehot, or a file of routes"
MOST_ROTATIONS = 8


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens: x [T, H], topk_idx int64 [T, K], distinct within a row, topk_weights fp32 [T, K], summing to
    1."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    def to(self, device: torch.device) -> Inputs:
        return Inputs(self.x.to(device), self.topk_idx.to(device), self.topk_weights.to(device))


def generator(*key: object) -> torch.Generator:
    """Return a random generator that depends only on the key, not on the rank or the time of the call."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def num_rotations(case: Case, cache_bytes: int) -> int:
    """Number of inputs that alternate: enough for all ranks' inputs to fill twice the last-level cache, but at most
    eight."""
    needed = -(-2 * cache_bytes // (case.ranks * case.tokens * case.row_bytes))
    return min(MOST_ROTATIONS, max(2, needed))


def make_inputs(case: Case, seed: int, rank: int, rotation: int) -> Inputs:
    """Make input number `rotation` of a rank."""
    g = generator(seed, "tokens", rank, rotation)
    x = torch.randn(case.tokens, case.hidden, generator=g).to(case.torch_dtype)
    weights = torch.randn(case.tokens, case.topk, generator=g).softmax(-1)
    return Inputs(x, route(case, seed, rank, rotation), weights)


def route(case: Case, seed: int, rank: int, rotation: int) -> Tensor:
    """Return int64 [T, K]: K distinct experts for each token.

    uniform: any K. lognormal:SIGMA: expert e is drawn without replacement with probability proportional to exp(SIGMA *
    z_e), where z is normal and identical on all ranks. onehot: every token takes experts 0 to K - 1. A file:
    recorded routes, layer after layer; each rank continues after the previous rank's rows, and wraps around at the end.
    """
    kind, _, argument = case.routing.partition(":")
    shape = (case.tokens, case.experts)
    g = generator(seed, "routing", rank, rotation)
    if kind == "uniform" and not argument:
        return torch.rand(shape, generator=g).topk(case.topk).indices
    if kind == "lognormal" and _is_number(argument):
        log_popularity = float(argument) * torch.randn(case.experts, generator=generator(seed, "popularity"))
        gumbel = -torch.empty(shape).exponential_(generator=g).log()
        return (log_popularity + gumbel).topk(case.topk).indices  # Gumbel top-k: drawing without replacement
    if kind == "onehot" and not argument:
        return torch.arange(case.topk).repeat(case.tokens, 1)
    if kind == "trace" or Path(case.routing).suffix in (".npy", ".npz"):
        trace = _read_trace(case.routing.removeprefix("trace:"), case)
        first = (rotation * case.ranks + rank) * case.tokens
        return trace[(first + torch.arange(case.tokens)) % len(trace)]
    raise InvalidConfig(f"routing: got {case.routing!r}, expected {ROUTING_HELP}")


def _is_number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


@lru_cache(4)
def _recorded(path: str, num_experts: int) -> Tensor:
    """Return int64 [layers * tokens, K], layer after layer, without padding."""
    rows = load(path, num_experts).topk_idx.transpose(0, 1).flatten(0, 1).to(torch.int64)
    return rows[(rows >= 0).all(1)]


def _read_trace(path: str, case: Case) -> Tensor:
    trace = _recorded(path, case.experts)
    expect(trace.shape[1] == case.topk, "routing", f"K = {trace.shape[1]} in {path}", f"K = {case.topk}")
    expect(len(trace) > 0, "routing", f"only padding in {path}", "at least one token")
    repeats = (trace.sort(dim=1).values.diff(dim=1) == 0).any()
    expect(not repeats, "routing", f"an expert twice in a row of {path}", "distinct experts")
    return trace
