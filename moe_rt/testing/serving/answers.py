"""Greedy answers of two engines, compared where they part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parting:
    """Where one answer leaves another.

    Attributes:
        step: of the first other token; of the last token where all are the same.
        same: whether they are.
        apart: difference of the log-probabilities that the two engines gave the second one's token at that step.
    """

    step: int
    same: bool
    apart: float


def parting(wanted: dict[str, Any], got: dict[str, Any]) -> Parting:
    """Of two answers of `moe_rt.testing.serving.engines.generate` to the same prompt, which have log-probabilities.

    A token that is not among the likeliest of the first engine, as many as it was asked for, is infinitely far away.
    """
    pairs = list(zip(wanted["tokens"], got["tokens"], strict=True))
    step = next((i for i, (token, other) in enumerate(pairs) if token != other), len(pairs) - 1)
    other = str(pairs[step][1])
    apart = abs(wanted["logprobs"][step].get(other, float("-inf")) - got["logprobs"][step][other])
    return Parting(step, pairs[step][0] == pairs[step][1], apart)
