"""Workloads of the engines: a number of sequences per rank, which are prefilled or then decoded."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moe_rt.testing.serving.models import VOCABULARY

SHORT = 16  # tokens of a prompt that is to be decoded


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of each rank.

    Attributes:
        sequences: number per rank.
        prompt: tokens of each prompt.
        steps: decoding steps after the prefill; 0 if the prefill is timed.
    """

    sequences: int
    prompt: int
    steps: int

    @classmethod
    def decode(cls, sequences: int, steps: int) -> Load:
        return cls(sequences=sequences, prompt=SHORT, steps=steps)

    @classmethod
    def prefill(cls, tokens: int) -> Load:
        return cls(sequences=1, prompt=tokens, steps=0)

    @property
    def most_at_once(self) -> int:
        """Tokens of a rank in its largest step."""
        return self.sequences * self.prompt

    @property
    def tokens(self) -> int:
        """Tokens of a rank within the measured time."""
        return self.sequences * self.steps if self.steps else self.most_at_once

    def in_words(self) -> str:
        if not self.steps:
            return f"prefill: {self.prompt} tokens a rank"
        sequences = "1 sequence" if self.sequences == 1 else f"{self.sequences} sequences"
        return f"decode: {sequences} a rank, {self.steps} steps"

    def prompts(self, ranks: int, seed: int) -> list[list[int]]:
        """Prompts of all ranks; each rank takes every ranks-th."""
        draw = random.Random(f"{seed} {self}")
        return [[draw.randrange(3, VOCABULARY) for _ in range(self.prompt)] for _ in range(ranks * self.sequences)]
