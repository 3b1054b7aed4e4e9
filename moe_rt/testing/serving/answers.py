"""Compares greedy answers of two engines at the first token that differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parting:
    """The first difference between two answers.

    Attributes:
        step: step of the first different token; of the last token if all are equal.
        same: True if all tokens are equal.
        apart: difference of the log-probabilities that the two engines gave the second one's token at that step.
    """

    step: int
    same: bool
    apart: float


def parting(wanted: dict[str, Any], got: dict[str, Any]) -> Parting:
    """Compare two answers of `moe_rt.testing.serving.engines.generate` to the same prompt, with log-probabilities.

    `apart` is infinite for a token that is not among the likeliest tokens that the first engine was asked for.
    """
    pairs = list(zip(wanted["tokens"], got["tokens"], strict=True))
    step = next((i for i, (token, other) in enumerate(pairs) if token != other), len(pairs) - 1)
    other = str(pairs[step][1])
    apart = abs(wanted["logprobs"][step].get(other, float("-inf")) - got["logprobs"][step][other])
    return Parting(step, pairs[step][0] == pairs[step][1], apart)
