"""Training after a model was compiled or exported, and the other way round, as in test_modes.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ops import cases_modes as cases
from ops.test_modes import any_two
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(("heap", "first", "seconds"), any_two("threads", usual_by_default=True, slow=True))
def test_a_buffer_trains_after_a_slow_mode(make_ranks: MakeRanks, heap: str, first: str, seconds: list[str]) -> None:
    make_ranks(heap, 1).run(cases.buffer_case, heap, first, seconds)


@pytest.mark.parametrize(("heap", "first", "seconds"), any_two("threads", usual_by_default=False, slow=True))
def test_a_layer_trains_after_a_slow_mode(make_ranks: MakeRanks, heap: str, first: str, seconds: list[str]) -> None:
    make_ranks(heap, 1).run(cases.layer_case, heap, first, seconds)
