"""GradScaler skips a step on all ranks if a gradient overflowed on any, in any layout of experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from replicas import cases_scaling as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize(
    ("over", "clip"),
    [("group", ""), ("group", "torch"), ("group", "moe_rt"), ("mesh", ""), ("mesh", "moe_rt"), ("fsdp", ""),
     ("sharded", ""), ("sharded", "moe_rt")],
)  # fmt: skip
def test_all_ranks_skip_a_step_or_none(make_ranks: MakeRanks, over: str, clip: str, optimizers: int) -> None:
    for scales, moved, equal, copies in make_ranks("shm", 2).run(cases.scaled, over, clip, optimizers):
        assert scales == [1024.0, 512.0, 512.0, 256.0, 128.0, 128.0]
        assert moved == [True, False, True, False, False, True]
        assert equal
        assert copies


def test_a_rank_without_gradients_skips_as_well(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 2).run(cases.frozen) == [True, True]
