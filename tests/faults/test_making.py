"""A buffer that cannot be made: every rank learns at once, whatever went wrong on whichever rank, and can try again."""

from __future__ import annotations

from collections.abc import Callable

import cases_making as cases
from harness import Ranks

MakeRanks = Callable[[str, int], Ranks]
CULPRIT, SIZE = cases.CULPRIT, 3
AT_ONCE_S = 15.0  # init_timeout_s is 300; a loaded machine explains the rest


def told(outcomes: list[tuple[str, float]], kind: str, words: str) -> None:
    """Every rank raised `kind` with these words, and none waited."""
    for text, seconds in outcomes:
        assert text.startswith(f"{kind}: "), outcomes
        assert words in text, outcomes
        assert seconds < AT_ONCE_S


def test_an_engine_that_one_rank_cannot_make(make_ranks: MakeRanks) -> None:
    told(make_ranks("shm", SIZE).run(cases.wrong_isa), "InvalidConfig", "rank 1 could not make its engine")
