"""Ranks of chaos that run in different sessions concurrently."""

from __future__ import annotations

from moe_rt.lab.chaos.rank_pool import ENDLESS, RankPool


def test_a_newer_session_has_an_end_of_its_own() -> None:
    """A rank that was stopped in an older session resumes there, and does not end with the newer one."""
    with RankPool(2) as pool:
        pool.session([0], ENDLESS)
        pool.session([1], 3)
        newer = pool.report(1, 600.0)
        assert (newer["raised"], newer["steps"]) == ("nothing", 3)
        assert list(pool.board.steps) == [ENDLESS, 3]
        last = pool.finish([0])
        older = pool.report(0, 600.0)
        assert (older["raised"], older["steps"]) == ("nothing", last)
        assert last > 3
