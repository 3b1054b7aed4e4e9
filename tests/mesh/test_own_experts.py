"""A user's experts over a buffer, and adapters on experts, train in wrappers as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mesh import cases_own_experts as cases
from support.ranks import Ranks, ThreadRanks

from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("kind", [cases.Listed, cases.Stacked])
def test_own_experts_train_as_one_process(make_ranks: MakeRanks, kind: Any) -> None:
    expected = cases.trained(None, kind)
    for got in make_ranks("shm", 2).run(cases.trained, kind):
        assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("how", ["at once", "later"])
def test_own_experts_that_nobody_named_are_refused(make_ranks: MakeRanks, how: str) -> None:
    for outcome in make_ranks("shm", 2).outcomes(cases.unmarked, how):
        with pytest.raises(InvalidConfig, match=r"expected moe_rt\.parallel\.own_experts\(module, buffer\)"):
            raise outcome


@pytest.mark.parametrize("how", ["layer", "experts"])
def test_experts_that_name_themselves_are_refused(make_ranks: MakeRanks, how: str) -> None:
    kind = "MoELayer" if how == "layer" else "Experts"
    for outcome in make_ranks("shm", 2).outcomes(cases.refused, how):
        with pytest.raises(InvalidConfig, match=f"own_experts: got {kind} in the module"):
            raise outcome


def test_threads_are_refused() -> None:
    for outcome in ThreadRanks(2).outcomes(cases.of_threads):
        with pytest.raises(InvalidConfig, match="2 ranks that are threads"):
            raise outcome


def test_whole_experts_go_on(make_ranks: MakeRanks) -> None:
    for expected, got in make_ranks("shm", 2).run(cases.saved_on_one, cases.Stacked, True):
        assert got == expected


@pytest.mark.parametrize("kind", [cases.Listed, cases.Stacked])
def test_another_rank_s_file_is_refused(make_ranks: MakeRanks, kind: Any) -> None:
    other = make_ranks("shm", 2).outcomes(cases.saved_on_one, kind, False)[1]
    with pytest.raises(InvalidConfig, match=r"got experts \[0, 1\], expected this rank's, \[2, 3\]"):
        raise other


def test_experts_that_are_frozen_or_replaced_are_parts_in_the_forward(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 2).run(cases.remade) == [[True] * 5] * 2


def test_own_experts_compile_to_one_graph(make_ranks: MakeRanks) -> None:
    for eager, compiled in make_ranks("shm", 2).run(cases.compiled):
        torch.testing.assert_close(compiled, eager)


def test_a_copy_knows_its_experts(make_ranks: MakeRanks) -> None:
    for expected, got in make_ranks("shm", 2).run(cases.copied):
        assert got == expected


@pytest.mark.parametrize("layout", ["hf", "split"])
def test_adapters_train_as_in_one_process(make_ranks: MakeRanks, layout: str) -> None:
    expected = cases.adapted(None, layout)
    for got in make_ranks("shm", 2).run(cases.adapted, layout):
        assert got == pytest.approx(expected, rel=1e-4)


def test_adapters_that_come_after_prepare_are_refused(make_ranks: MakeRanks) -> None:
    for outcome in make_ranks("shm", 2).outcomes(cases.adapted, "hf", True):
        with pytest.raises(InvalidConfig, match=r"expected moe_rt\.parallel\.prepare\(model\)"):
            raise outcome


@pytest.mark.parametrize("kind", [cases.Listed, cases.Stacked, cases.Pair, cases.Tied])
def test_copies_train_as_one_process(make_ranks: MakeRanks, kind: Any) -> None:
    expected = cases.trained(None, kind)
    for got in make_ranks("shm", 4).run(cases.trained_next_to_copies, kind):
        assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", [cases.Parted, cases.Pair])
def test_without_copies_a_forward_is_not_needed(make_ranks: MakeRanks, kind: Any) -> None:
    expected = cases.trained(None, kind, cases.Outside)
    for got in make_ranks("shm", 2).run(cases.trained, kind, cases.Outside):
        assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (cases.Parted, "own_experts: got a Parted, which has no forward, and copies of these experts"),
        (cases.Pair, "was used outside of the module's forward"),
    ],
)
def test_copies_without_a_place_for_their_means_are_refused(make_ranks: MakeRanks, kind: Any, message: str) -> None:
    for outcome in make_ranks("shm", 4).outcomes(cases.trained_next_to_copies, kind, cases.Outside):
        with pytest.raises(InvalidConfig, match=message):
            raise outcome


def test_a_reentrant_checkpoint_in_the_forward_of_copies_is_refused(make_ranks: MakeRanks) -> None:
    """It reads the weights again in backward."""
    for outcome in make_ranks("shm", 4).outcomes(cases.trained_next_to_copies, cases.Checkpointed):
        with pytest.raises(InvalidConfig, match="was used outside of the module's forward"):
            raise outcome


@pytest.mark.parametrize("how", ["eager", "chunks"])
def test_adapters_by_hand_train_as_in_one_process(make_ranks: MakeRanks, how: str) -> None:
    """They have weights of their own, whose gradients become means as well."""
    expected = cases.adapted_by_hand(None, False, "eager")
    for got in make_ranks("shm", 2).run(cases.adapted_by_hand, False, how):
        assert got == pytest.approx(expected, rel=1e-4)


def test_adapters_by_hand_with_copies_are_refused(make_ranks: MakeRanks) -> None:
    for outcome in make_ranks("shm", 4).outcomes(cases.adapted_by_hand, True, "eager"):
        with pytest.raises(InvalidConfig, match=r"experts: got a weight \[2, 16, 2\] of an adapter, and copies"):
            raise outcome


def test_adapters_train_next_to_copies(make_ranks: MakeRanks) -> None:
    expected = cases.adapted(None, "hf")
    for got in make_ranks("shm", 4).run(cases.adapted, "hf", False, True):
        assert got == pytest.approx(expected, rel=1e-4)
