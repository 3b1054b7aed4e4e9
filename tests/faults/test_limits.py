"""Too few descriptors or threads for one rank raise a typed error on every rank; nothing is silently skipped."""

from __future__ import annotations

from collections.abc import Callable

from faults import cases_limits as cases
from support.ranks import ProcessRanks, Ranks

MakeRanks = Callable[[str, int], Ranks]
SIZE = 3


def test_descriptor_limit_of_one_rank_is_reported_to_all() -> None:
    """All ranks raise wherever the descriptors run out; once a buffer is made, a death is noticed."""
    ranks = ProcessRanks(SIZE)
    outcomes = ranks.outcomes(cases.at_the_descriptor_limit, 20)
    ranks.close()
    assert isinstance(outcomes[1], ChildProcessError), "it got so far as to die"
    for rank in (0, 2):
        *refused, last = outcomes[rank]
        # A segment and a watch for each peer, this rank's segment, and the descriptor that maps it.
        assert len(refused) > 2 * (SIZE - 1), outcomes
        for text in refused:
            assert text.startswith("LimitReached: rank 1 could not"), outcomes
            assert "expected room for more descriptors (ulimit -n)" in text, outcomes
        assert last == "PeerDead", outcomes


def test_buffers_of_a_group_share_the_watches_of_its_processes(make_ranks: MakeRanks) -> None:
    for none, one, two, three, closed in make_ranks("shm", SIZE).run(cases.descriptors_of_buffers, 3):
        assert (one - none, two - one, three - two) == (SIZE + SIZE - 1, SIZE, SIZE)
        assert closed == none


def test_lane_that_cannot_start_is_reported_to_all(make_ranks: MakeRanks) -> None:
    for text, left in make_ranks("shm", SIZE).run(cases.without_address_space):
        assert text.startswith("LimitReached: rank 1 could not make its engine"), text
        assert "threads (ulimit -u" in text
        assert left == 0, "threads stayed behind"
