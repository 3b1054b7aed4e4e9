"""A placement gives each expert's rank, in every form that it may be passed in."""

from __future__ import annotations

import pytest
from support.routing import make_spec

from moe_rt.config.placement import Placement
from moe_rt.errors import InvalidConfig


def test_contiguous_blocks_are_the_default() -> None:
    placement = make_spec(3, num_experts=8).placement
    assert placement == Placement.contiguous(8, 3)
    assert [placement.local_experts(rank) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [placement.num_local(rank) for rank in range(3)] == [3, 3, 2]


@pytest.mark.parametrize("as_placement", [False, True])
def test_ranks_may_be_given(as_placement: bool) -> None:
    ranks = [1, 0, 1, 1, 2]
    given = Placement.from_ranks(ranks) if as_placement else ranks
    placement = make_spec(3, num_experts=5, placement=given).placement
    assert placement.places == (((1, 0),), ((0, 0),), ((1, 1),), ((1, 2),), ((2, 0),))
    assert placement.ranks == (1, 0, 1, 1, 2)
    assert placement.local_experts(1) == [0, 2, 3]
    assert placement.num_local(1) == 3


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([[(0, 0), (1, 0)], [(1, 1)]], "placement: got 2 places for expert 0, expected one"),
        ([[], [(1, 0)]], "placement: got 0 places for expert 0, expected one"),
        ([[(0, 0)], [(1, 1)]], "expected local indices in the order of expert ids"),
        ([[(0, 0)], [(0, 1)]], r"placement: got \[0\], expected every rank of 2"),
        ([[(0, 0)]], "placement: got 1 entries, expected num_experts = 2 entries"),
    ],
)
def test_places_that_the_protocol_has_not(places: list[list[tuple[int, int]]], message: str) -> None:
    given = Placement(tuple(tuple(each) for each in places))
    with pytest.raises(InvalidConfig, match=message):
        make_spec(2, num_topk=1, num_experts=2, placement=given)
