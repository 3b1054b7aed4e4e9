"""Seeded inputs of every contestant. Any rank can make any rank's inputs, so each can check the others'."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_rt.errors import InvalidConfig
from moe_rt.lab.bench.cases import Case

ROUTING_HELP = "uniform, lognormal:SIGMA, onehot or trace:FILE"
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
    z_e), where z is normal and identical on all ranks. onehot: every token takes experts 0 to K - 1. trace:FILE: rows
    of a .npy array [N, K]; each rank continues after the previous rank's rows, and wraps around at the end.
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
    if kind == "trace" and argument:
        trace = _read_trace(Path(argument), case)
        first = (rotation * case.ranks + rank) * case.tokens
        return trace[(first + torch.arange(case.tokens)) % len(trace)]
    raise InvalidConfig(f"routing: got {case.routing!r}, expected {ROUTING_HELP}")


def _is_number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _read_trace(path: Path, case: Case) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"routing: cannot read {path} as a .npy array: {error}") from error
    if array.ndim != 2 or array.shape[1] != case.topk or not len(array) or array.dtype.kind not in "iu":
        got = f"{array.dtype} {list(array.shape)}"
        raise InvalidConfig(f"routing: got {got} in {path}, expected integers [N, K] with K = {case.topk}")
    trace = torch.from_numpy(array.astype(np.int64))
    repeats = (trace.sort(dim=1).values.diff(dim=1) == 0).any()
    if repeats or trace.min() < 0 or trace.max() >= case.experts:
        raise InvalidConfig(f"routing: got other than distinct experts below {case.experts} in a row of {path}")
    return trace
