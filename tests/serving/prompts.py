"""Requests that tests send: prompts of token ids, and their distribution over ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from moe_rt.lab.testing.serving.models import VOCABULARY

LENGTHS = [16, 52, 24, 40, 33, 47, 26]  # ranks finish at different steps


def prompts(*num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Return one prompt of each length, determined by the seed."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(n)] for n in num_tokens]


PROMPTS = prompts(5, 17, 1, 33, 9, 64, 12)


def dealt(items: Sequence[Any], size: int) -> list[list[Any]]:
    """Return every rank's share: each size-th item."""
    return [list(items[rank::size]) for rank in range(size)]


def gathered(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the answers to dealt items in the items' order; raise what a rank raised instead of answering."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    total, size = sum(map(len, answers)), len(answers)
    return [answers[i % size][i // size] for i in range(total)]


def tokens(answers: Sequence[Any]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]
