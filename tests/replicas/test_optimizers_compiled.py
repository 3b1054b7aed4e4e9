"""A compiled step of an optimizer keeps copies equal."""

from __future__ import annotations

from collections.abc import Callable

from replicas import cases_optimizers as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]


def test_a_compiled_step(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 2).run(cases.compiled) == [True, True]
