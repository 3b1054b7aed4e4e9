"""The norm for clipping equals one process's for every layout of parameters, and is identical on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mesh import cases_mesh as cases
from support.ranks import Ranks, ThreadRanks

from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(
    ("size", "kind"),
    [(size, kind) for size in (1, 2, 4) for kind in ("group", "mesh")] + [(4, "fsdp"), (4, "fsdp over a group")],
)
def test_norm_is_that_of_one_process(make_ranks: MakeRanks, size: int, kind: str) -> None:
    expected = cases.clipped(None, "group")
    assert expected == pytest.approx((0.51, 0.1), rel=1e-2)
    results = make_ranks("shm", size).run(cases.clipped, kind)
    assert len(set(results)) == 1
    assert results[0] == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_gradients(make_ranks: MakeRanks) -> None:
    """A rank whose experts got no token, or whose backward was skipped, calls the collectives of the others."""
    for without in ("experts", "everything"):
        assert len(set(make_ranks("shm", 2).run(cases.clipped_without, without))) == 1


def test_any_mixture_of_tensors(make_ranks: MakeRanks) -> None:
    expected = (2 * 4**2 + 2 * 3**2) ** 0.5
    for got in make_ranks("shm", 2).run(cases.clipped_by_hand):
        assert got == pytest.approx([expected, *(x / expected for x in (4, 4, 3, 3))], rel=1e-6)


def test_threads_are_refused() -> None:
    for outcome in ThreadRanks(2).outcomes(cases.clipped_threads):
        with pytest.raises(InvalidConfig, match="got 2 ranks that are threads, expected a ProcessGroup"):
            raise outcome
