"""Combinations of test parameters: by default each value occurs, and only a sweep has every combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def each_value(*lists: Iterable[Any]) -> list[Any]:
    """Return all combinations of one value of each list, as arguments of `parametrize`.

    Those of a diagonal, in which each value occurs, run by default; the others are marked `sweep`.
    """
    values = [list(given) for given in lists]
    diagonal = {tuple(i % len(given) for given in values) for i in range(max(map(len, values)))}
    return [
        pytest.param(
            *(given[i] for given, i in zip(values, places, strict=True)),
            marks=() if places in diagonal else pytest.mark.sweep,
        )
        for places in itertools.product(*(range(len(given)) for given in values))
    ]
