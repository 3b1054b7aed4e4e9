"""Parameters of experts are parts however they got there: made, assigned, loaded, cast, moved or adapted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replicas import cases_marks as cases
from support.ranks import Ranks
from torch import Tensor

from moe_rt.buffer import replicas
from moe_rt.nn import part, part_reductions
from moe_rt.nn.part import Whole, as_part

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("after", [False, True], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("way", {**cases.WAYS, **cases.RESHAPING})
def test_norms_are_those_of_all_ranks(make_ranks: MakeRanks, way: str, after: bool) -> None:
    results = make_ranks("shm", 2).run(cases.norms, way, after)
    assert len({theirs for theirs, *_ in results}) == 1
    for theirs, ours, by_hand, plain in results:
        assert theirs == pytest.approx(by_hand, rel=1e-5)
        assert ours == pytest.approx(by_hand, rel=1e-5)
        assert plain == []


def test_values_survive(make_ranks: MakeRanks) -> None:
    ranks = make_ranks("shm", 2)
    [expected, _] = ranks.run(cases.norms, "nothing", False)
    for way in cases.WAYS:
        assert ranks.run(cases.norms, way, True)[0][0] == pytest.approx(expected[0], rel=1e-5), way


def test_pickles_and_copies(make_ranks: MakeRanks) -> None:
    for norms in make_ranks("shm", 2).run(cases.pickled):
        assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-6)


def test_offloading_hooks(make_ranks: MakeRanks) -> None:
    for before, offloaded in make_ranks("shm", 2).run(cases.offloaded):
        assert offloaded == before


def test_models_made_without_memory(make_ranks: MakeRanks) -> None:
    for on_meta, expected, got in make_ranks("shm", 2).run(cases.made_empty):
        assert on_meta
        assert got == pytest.approx(expected, rel=1e-6)


def test_functional_calls(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 2).run(cases.called_with_others) == [True, True]


class Node:
    """A node of autograd's graph."""


def test_leaves_of_a_graph_with_several_branches() -> None:
    """A branch that ends at the dispatch, or was seen before, hides no weight of another branch."""

    def node(name: str, *before: Any, **more: Any) -> Any:
        made = Node()
        vars(made).update(name=lambda: name, next_functions=[(each, 0) for each in before], **more)
        return made

    first, second = (torch.zeros(1) for _ in range(2))
    behind = node("AccumulateGrad", variable=torch.zeros(1))
    weight, bias = node("AccumulateGrad", variable=first), node("AccumulateGrad", variable=second)
    product = node("Mm", weight, node("MoeRtDispatchBackward", behind))
    graph = node("Add", product, None, bias, product, node("MoeRtDispatchBackward", behind))
    assert {id(t) for t in replicas.leaves(graph)} == {id(first), id(second)}


WHOLE = Whole("a group", (2, 3), 4)
PIECE = Whole("a group", (), 0)
RESULTS: dict[str, tuple[Callable[[Tensor], Tensor], Whole | None]] = {
    "elementwise": (lambda p: p * 2 + p, WHOLE),
    "an update of another shape": (lambda p: p.sum(-1, keepdim=True), WHOLE),
    "one expert": (lambda p: p[1], PIECE),
    "a view": (lambda p: p.view(-1), PIECE),
    "a copy in another dtype": (lambda p: p.double(), WHOLE),
    "experts in another order": (lambda p: p.flip(0)[[0]], PIECE),
    "all of them stacked": (lambda p: torch.stack([p, torch.zeros(2, 4, 6)]), PIECE),
    "a sum over columns": (lambda p: p.sum(-1), None),
    "a norm of each expert": (lambda p: p.flatten(1).norm(dim=1), None),
    "a product with tokens": (lambda p: torch.ones(3, 4) @ p[0], None),
}


@pytest.mark.parametrize("name", RESULTS)
def test_which_results_are_parts(name: str) -> None:
    """Moved elements and results of the same experts are; reductions and products are not."""
    compute, expected = RESULTS[name]
    out = compute(as_part(torch.randn(2, 4, 6), WHOLE))
    assert getattr(out, "whole", None) == expected
    assert getattr(out, "mixed", False) is (name == "all of them stacked")


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "largest": torch.amax,
    "smallest": torch.amin,
    "norm": torch.linalg.vector_norm,
    "third norm": lambda p: torch.linalg.vector_norm(p, 3.0),
    "largest magnitude": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "smallest magnitude": lambda p: torch.linalg.vector_norm(p, float("-inf")),
    "number of nonzero elements": torch.count_nonzero,
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_over_parts_of_two_sizes_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The collectives are stood in for: this rank gets what the other rank has given, or its own number back."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    given: list[Tensor] = []

    def all_reduce(number: Tensor, how: str, group: str) -> Tensor:
        assert group == "a group"
        given.append(number)
        return number if len(given) == 1 else combine[how](number, given[0])

    monkeypatch.setattr(part, "wants_all_ranks", lambda: True)
    monkeypatch.setattr(part_reductions, "_all_reduce", all_reduce)
    ours, theirs = torch.randn(2, 4), torch.randn(3, 4)
    ours[1, 2] = 0
    for piece in (theirs, ours):
        got = REDUCTIONS[name](as_part(piece, WHOLE))
    torch.testing.assert_close(got, REDUCTIONS[name](torch.cat([ours, theirs])))
